"""The types of the answers of /v1/responses and /v1/messages; a test compares them."""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired, TypedDict

from trunkline.server.openapi.shapes import ContentLogprob
from trunkline.server.route import Gives


class ContentPart(TypedDict):
    """A text; that of a message has log-probs, empty unless they were asked for."""

    type: Literal["input_text", "output_text", "reasoning_text", "refusal"]
    text: NotRequired[str]
    refusal: NotRequired[str]
    annotations: NotRequired[list[dict[str, Any]]]
    logprobs: NotRequired[list[ContentLogprob]]


class SummaryPart(TypedDict):
    """Part of a summary of thoughts: clients may send them, there are none in answers."""

    type: Literal["summary_text"]
    text: str


class Item(TypedDict):
    """An input or output item; which of the keys it has depends on its type."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["user", "assistant", "system", "developer"]]
    content: NotRequired[list[ContentPart]]
    summary: NotRequired[list[SummaryPart]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    output: NotRequired[str | list[ContentPart]]


class ResponseFailure(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(TypedDict):
    """Of the prompt's tokens those that were cached, and those that are now."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Of the answer's tokens those of thoughts."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(TypedDict):
    """A response, with the request's fields as they were understood."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    output: list[Item]
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseEvent(TypedDict):
    """An event of a response; which of the keys it has depends on its type."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[Item]
    part: NotRequired[ContentPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[ContentLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]


class ItemPage(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    """The response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputTokens(TypedDict):
    """How many tokens the prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Block(TypedDict):
    """A content block of a message; which of the keys it has depends on its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    citations: NotRequired[None]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageUsage(TypedDict):
    """Token counts; `input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: dict[str, int]
    output_tokens: int
    service_tier: str


class Message(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """An event of a message; which of the keys it has depends on its type."""

    type: str
    message: NotRequired[Message]
    index: NotRequired[int]
    content_block: NotRequired[Block]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]


class MessageTokens(TypedDict):
    """How many tokens the prompt has."""

    input_tokens: int


class MessageErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str


class MessageError(TypedDict):
    """An error as Anthropic writes it."""

    type: Literal["error"]
    error: MessageErrorDetail


RESPONSE: Final = Gives(kind=Response, event=ResponseEvent, named_events=True)
ONE_RESPONSE: Final = Gives(kind=Response)
ITEMS: Final = Gives(kind=ItemPage)
DELETED_RESPONSE: Final = Gives(kind=DeletedResponse)
INPUT_TOKENS: Final = Gives(kind=InputTokens)
MESSAGE: Final = Gives(kind=Message, event=MessageEvent, named_events=True)
MESSAGE_TOKENS: Final = Gives(kind=MessageTokens)
