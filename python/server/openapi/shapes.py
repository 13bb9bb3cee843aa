"""The types of answers. A test compares them with what the endpoints send."""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired, TypedDict

from trunkline.server.load import Loads
from trunkline.server.route import TEXT, Gives

Logprob = tuple[float | None, int, str | None]


class CachedTokens(TypedDict):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class ReasoningTokens(TypedDict):
    """Tokens of the answer that are reasoning."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts: each prompt once, all samples' answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: CachedTokens | None
    completion_tokens_details: NotRequired[ReasoningTokens]


class WeightSpan(TypedDict):
    """Which weights made the tokens from `start` to `end`."""

    version: str
    start: int
    end: int


class Metadata(TypedDict):
    """The weights behind an answer."""

    weight_version: str
    weight_versions: list[WeightSpan]


class TokenLogprob(TypedDict):
    """A token, its bytes and its log-prob."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    """A token of the answer with the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """One entry per token, the stop token included."""

    content: list[ContentLogprob] | None


class FunctionCall(TypedDict):
    """What is called; `arguments` are JSON text as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict):
    """The name in a call's first delta, and more of its arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What is new of a call; `id` and `type` are in its first delta only."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class AssistantMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One sample. `matched_stop` is the token id or string that ended it."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: int | str | None


class ChatCompletion(TypedDict):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: Metadata


class ChatDelta(TypedDict, total=False):
    """What is new of a message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """What is new of a sample; the last one has the finish reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None


class ChatChunk(TypedDict):
    """An event of a streamed chat completion; the one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobs(TypedDict):
    """Lists with an entry per token; `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One sample of one prompt: `index` is prompt x n + sample."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None


class Completion(TypedDict):
    """A completion, or an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metadata: NotRequired[Metadata]


class FinishReason(TypedDict):
    """How a sample ended; the other keys depend on `type`."""

    type: Literal["stop", "length", "abort"]
    matched: NotRequired[int | str | None]
    length: NotRequired[int]
    message: NotRequired[str]
    status_code: NotRequired[int | None]
    err_type: NotRequired[str | None]


class MetaInfo(TypedDict):
    """Facts of a sample; null where there is no value yet. Times are unix seconds."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float | None
    output_token_logprobs: NotRequired[list[Logprob]]
    input_token_logprobs: NotRequired[list[Logprob]]
    output_top_logprobs: NotRequired[list[list[Logprob] | None]]
    input_top_logprobs: NotRequired[list[list[Logprob] | None]]


class Generated(TypedDict):
    """One sample; `index` is its place in a batch. Of a stream: all so far, or what is new."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]
    index: NotRequired[int]


class Model(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """The served models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """Token ids of a text or of several, and how many."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class Text(TypedDict):
    """The text of token ids, or texts."""

    text: str | list[str]


class ParsedCall(TypedDict):
    """A call that was found in a text; `parameters` are JSON text as the model wrote it."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(TypedDict):
    """The calls in a text, and the text around them."""

    normal_text: str
    calls: list[ParsedCall]


class SeparatedReasoning(TypedDict):
    """The reasoning in a text, and the rest."""

    reasoning_text: str | None
    text: str | None


class ModelInfo(TypedDict):
    """What is served."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    weight_version: str
    model_type: str
    architectures: list[str]


class ServerInfo(TypedDict):
    """All settings by their flat names, secrets redacted, and what became of them."""

    served_model_name: str
    model_path: str
    version: str
    default_sampling_params: dict[str, dict[str, Any]]
    limits: dict[str, int]
    internal_states: list[dict[str, Any]]


GENERATED: Final = Gives(kind=Generated | list[Generated], event=Generated)
CHAT: Final = Gives(kind=ChatCompletion, event=ChatChunk)
COMPLETION: Final = Gives(kind=Completion, event=Completion)
MODELS: Final = Gives(kind=ModelList)
MODEL: Final = Gives(kind=Model)
TOKENS: Final = Gives(kind=Tokens)
PARSED_CALLS: Final = Gives(kind=ParsedCalls)
SEPARATED: Final = Gives(kind=SeparatedReasoning)
DETOKENIZED: Final = Gives(kind=Text)
MODEL_INFO: Final = Gives(kind=ModelInfo)
SERVER_INFO: Final = Gives(kind=ServerInfo)
LOADS: Final = Gives(kind=Loads)
NOTHING: Final = Gives(description="Yes; the body is empty.")
SENTENCE: Final = Gives(kind=str, media_type=TEXT)
