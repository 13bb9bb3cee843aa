"""What client and engine say to each other: msgpack arrays, typed on both sides.

Client to engine: a message is one `kind` byte and a msgpack payload; `Submit` is decoded by the
Rust scheduler (`rust/scheduler/src/messages.rs`), the others by `loop.py`. Engine to client: a blob
is one msgpack array of events. Fields are positional: both sides change together.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

SUBMIT: Final = b"S"
ABORT: Final = b"A"
CONTROL: Final = b"C"


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How a request's tokens are chosen; validated, every default filled in.

    `seed` is always set: clients derive it from the request id when the caller gave none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = 128  # None: as many as the context holds
    min_new_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int = 0  # 0 <= seed < 2**64
    logit_bias: list[tuple[int, float]] = []
    stop_regex: list[str] = []


class LogprobRequest(msgspec.Struct, array_like=True, frozen=True):
    """Which log-probs a request wants.

    `prompt_start` is the first prompt position that is scored; None scores output only. With
    `processed` the outputs' are those of the distribution that they were drawn from (after
    penalties, bias, masks and temperature, before top-k, top-p and min-p), not the model's own.
    """

    prompt_start: int | None = None
    top_n: int = 0
    ids: list[int] = []
    processed: bool = False


class GrammarSpec(msgspec.Struct, array_like=True, frozen=True):
    """What a request's output must be.

    `text` is a JSON Schema, a regular expression, EBNF or a structural tag (JSON), as `kind` says,
    and empty for a JSON object of any shape. The constraint begins after the ids `starts_after`
    have been generated in a row, the end of reasoning for instance; at once if there are none.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str = ""
    starts_after: list[int] = []


class Resume(msgspec.Struct, array_like=True, frozen=True):
    """What a sample already has when its request is submitted again."""

    output_ids: list[int]
    delivered_chars: int


class Submit(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One request.

    `key` is the client's handle, unique among its live requests; `rid` is the public id.
    `stream_interval` is the number of tokens between deltas; 0 delivers at the end only.
    `request_class` 0 is interactive, 1 is batch. `resume` has one entry per sample if another
    engine had the request (queue limits do not count it then), else none.
    With `pooled` the answer is the pooled state; `n` is 1 and `max_new_tokens` 0 then.
    `must_prepare` holds the request back until `Core.ready`; it is set where there is a `grammar`.
    """

    key: int
    rid: str
    prompt: list[int]
    sampling: SamplingParams
    n: int = 1
    stream_interval: int = 1
    priority: int = 0
    namespace: str = ""
    request_class: int = 0
    logprobs: LogprobRequest | None = None
    pooled: bool = False
    resume: list[Resume] = []
    must_prepare: bool = False
    grammar: GrammarSpec | None = None


class Abort(msgspec.Struct, array_like=True, frozen=True):
    """End one request: by the client's key, or by rid (whole request or one sample), or all."""

    key: int | None = None
    rid: str | None = None
    all: bool = False


class Control(msgspec.Struct, array_like=True, frozen=True):
    """A question to the loop, answered by `ControlReply` with the same key."""

    key: int
    verb: str  # flush_cache, server_info, ...
    arguments: dict[str, str | int | float | bool | None] = {}


class Accepted(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The request is in the queue; nothing can refuse it any more."""

    key: int


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The request never entered the queue. `status` is the HTTP status that fits."""

    key: int
    status: int
    kind: str  # invalid_request_error, queue_full, queue_timeout, preempted, ...
    message: str
    param: str | None


class Started(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """A sample has its first token; sent before its first delta. Times are unix seconds."""

    key: int
    sample: int
    cached_device: int
    cached_host: int
    forward_entry_time: float
    prefill_finished_time: float
    queue_time: float


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probs of consecutive tokens; `top` and `ids` hold `(logprob, id)` pairs per token.

    The first entry of a prompt that is scored from position 0 is NaN: nothing precedes it.
    """

    values: list[float]
    top: list[list[tuple[float, int]]] = []
    ids: list[list[tuple[float, int]]] = []


class Delta(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """New tokens of a sample. Offsets are absolute (tokens, code points): apply once."""

    key: int
    sample: int
    token_offset: int
    token_ids: list[int]
    text_offset: int
    text: str
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    num_retractions: int = 0


class Finished(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """The last delta of a sample and how it ended.

    `reason` is stop, length, abort or error; `matched` the token id, stop string or stop pattern
    that stopped it; `status` the HTTP status that fits an abort or error (0 when the client
    aborted). `completion_tokens` counts the stop token. `pooled_state` is the prompt's last token's
    final hidden state, after the last norm: float32, little-endian; None unless it was asked for.
    """

    key: int
    sample: int
    token_offset: int
    token_ids: list[int]
    text_offset: int
    text: str
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    reason: str
    matched: int | str | None
    message: str | None
    status: int
    completion_tokens: int
    num_retractions: int
    queue_time: float
    pooled_state: bytes | None = None


class ControlReply(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Answer to `Control`; `error` is None when it worked."""

    key: int
    value: dict[str, object]
    error: str | None = None


Event = Accepted | Refused | Started | Delta | Finished | ControlReply


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine knows about itself once it runs; constant until it is restarted."""

    pid: int
    model_path: str
    dtype: str
    device: str
    weight_version: str
    vocab_size: int
    page_size: int
    context_length: int
    max_total_tokens: int
    max_running_requests: int
    max_batch_tokens: int
    chunked_prefill_size: int | None
    weight_bytes: int
    kv_cache_bytes: int
    eos_token_ids: list[int]
    settings: dict[str, object]  # the resolved settings, flat
    startup_s: float


Access = Literal["exclusive", "suspects", "shared"]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine stands, as its client sees it now.

    `starting` covers the first start and every restart; `dead` is final. `heartbeat_age_s` is how
    long ago the engine's loop last went round (it does so before each step, and about once a second
    when idle); None before the first beat. `facts` are those of the last engine that was ready.
    `access` says what one that is ready may be given: `exclusive`, anything, and nobody else gives
    it something; `suspects`, nothing but these, which several clients try one after another
    (`recovery.py`); `shared`, anything, beside what others give it.
    """

    state: Literal["starting", "ready", "dead"]
    epoch: int
    access: Access = "exclusive"
    heartbeat_age_s: float | None = None
    facts: EngineFacts | None = None
    error: str | None = None
