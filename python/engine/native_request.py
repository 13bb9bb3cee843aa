"""The native `/generate` body -> validated, tokenised engine requests.

Used by the HTTP endpoint and by the embedded engine alike, so it knows nothing of HTTP. The fields
and their rules are listed in `docs/api.md`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, TypeVar

from trunkline.engine.client import Request
from trunkline.engine.config import SchedulerOptions
from trunkline.engine.messages import LogprobRequest
from trunkline.engine.prompts import TextEncoder, check_length, check_prompt, check_samples
from trunkline.engine.ranks import FIELDS as RANK_FIELDS
from trunkline.engine.ranks import parse_rank
from trunkline.engine.validation import (
    Limits,
    ParsedSampling,
    RequestError,
    is_int,
    parse_sampling_params,
    parse_token_ids,
    refuse_unsupported,
    shown,
)

Value = TypeVar("Value")

# Accepted and without effect: they label a request for tools around the server.
BOOKKEEPING: Final = frozenset(
    ("no_logs", "custom_labels", "session_id", "conversation_id", "routing_key")
)
SUPPORTED: Final = frozenset(
    (
        "text input_ids sampling_params rid stream return_logprob logprob_start_len "
        "top_logprobs_num token_ids_logprob return_text_in_logprobs return_prompt_token_ids "
        "priority extra_key cache_salt routed_dp_rank data_parallel_rank"
    ).split()
)
# Without return_logprob they say nothing, and are named as ignored unless they ask for nothing.
_LOGPROB_FIELDS: Final[Mapping[str, tuple[object, ...]]] = {
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_text_in_logprobs": (None, False),
}
# Known elsewhere, not served here: only null, or a value that changes nothing.
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([],),
    "mm_hashes": ([],),
    "session_params": ({},),
    "lora_path": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_indexer_topk": (False,),
    "return_entropy": (False,),
    "return_sampling_mask": (False,),
    "sampling_logprobs_mode": (),
    "log_metrics": (True,),
    "disagg_prefill_dp_rank": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "require_reasoning": (False,),
    "max_thinking_tokens": (),
    "background": (False,),
}


class RequestFields(TypedDict, total=False):
    """What `Engine` may be told besides prompt and sampling parameters, as in `/generate`."""

    input_ids: list[int] | list[list[int]]
    rid: str | list[str]
    return_logprob: bool | list[bool]
    logprob_start_len: int | list[int]
    top_logprobs_num: int | list[int]
    token_ids_logprob: list[int] | list[list[int]]
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    priority: int
    extra_key: str | list[str]
    cache_salt: str | list[str]
    routed_dp_rank: int
    data_parallel_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """What turning a body into requests depends on, apart from the body.

    `defaults` are sampling parameters by native name under what the client sends; `stream_interval`
    is the number of tokens between streamed updates when the client does not say;
    `processed_logprobs` are those of `LogprobRequest.processed`; `dp_size` is how many engines
    there are.
    """

    tokenizer: TextEncoder
    limits: Limits
    defaults: Mapping[str, Any]
    random_seed: int = 0
    stream_interval: int = 1
    priority_scheduling: bool = False
    processed_logprobs: bool = False
    dp_size: int = 1

    @classmethod
    def of(
        cls,
        scheduler: SchedulerOptions,
        tokenizer: TextEncoder,
        limits: Limits,
        defaults: Mapping[str, Any],
    ) -> RequestContext:
        """What the settings of a scheduler imply."""
        return cls(
            tokenizer=tokenizer,
            limits=limits,
            defaults=defaults,
            random_seed=scheduler.random_seed or 0,
            stream_interval=scheduler.stream_interval,
            priority_scheduling=scheduler.schedule_policy == "priority",
            processed_logprobs=scheduler.logprobs_mode == "processed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The fields that an engine request has besides prompt and sampling, validated."""

    stream: bool = False
    priority: int = 0
    namespace: str = ""
    logprobs: LogprobRequest | None = None
    dp_rank: int | None = None
    received_ts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """A parsed body. `rid` is the id that stands for all of it.

    `is_batch` says that the answer is a list even for one request; `ignored` names fields that
    nothing here knows or that have no effect in this body.
    """

    rid: str
    requests: list[Request]
    is_batch: bool
    stream: bool
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    ignored: list[str]


def parse_generate(
    body: Any, context: RequestContext, *, default_rid: str | None = None
) -> GenerateJob:
    """Validate and tokenise a `/generate` body.

    Args:
        body: the decoded JSON document.
        context: tokenizer, limits and defaults.
        default_rid: id for a body that has no `rid`; None makes one.

    Raises:
        RequestError: the body cannot be served; the message names field, row and limit.
    """
    received_ts = time.time()
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(body)}.")
    refuse_unsupported(body, UNSUPPORTED)
    prompts, is_batch = parse_prompts(body, context)
    rows = Rows(body, len(prompts), is_batch)
    stream = rows.flag("stream")
    rid, rids = parse_rids(body.get("rid"), rows, context.limits, default_rid)
    params = rows.of("sampling_params", dict)
    parsed = [
        parse_sampling_params(one, limits=context.limits, defaults=context.defaults)
        for one in (params if isinstance(body.get("sampling_params"), list) else params[:1])
    ]
    namespaces = [
        parse_namespace(extra_key, cache_salt, context.limits)
        for extra_key, cache_salt in zip(
            rows.of("extra_key", str), rows.of("cache_salt", str), strict=True
        )
    ]
    priority = parse_priority(body.get("priority"), context)
    dp_rank = parse_rank({name: body.get(name) for name in RANK_FIELDS}, context.dp_size)
    logprobs = rows.logprobs(prompts, context)
    num_samples = sum(one.n for one in parsed) if len(parsed) > 1 else parsed[0].n * len(prompts)
    check_samples(num_samples, context.limits)
    requests = []
    for row, prompt_ids in enumerate(prompts):
        options = RequestOptions(
            stream=stream,
            priority=priority,
            namespace=namespaces[row],
            logprobs=logprobs[row],
            dp_rank=dp_rank,
            received_ts=received_ts,
        )
        sampling = parsed[row] if len(parsed) > 1 else parsed[0]
        requests.append(make_request(context, rids[row], prompt_ids, sampling, options))
    known = SUPPORTED | UNSUPPORTED.keys() | BOOKKEEPING
    ignored = [key for key in body if key not in known]
    if not any(logprobs):
        ignored += [key for key, none in _LOGPROB_FIELDS.items() if body.get(key) not in none]
    if not stream and any(one and one.get("stream_interval") is not None for one in params):
        ignored.append("sampling_params.stream_interval")
    return GenerateJob(
        rid=rid,
        requests=requests,
        is_batch=is_batch,
        stream=stream,
        return_text_in_logprobs=rows.flag("return_text_in_logprobs"),
        return_prompt_token_ids=rows.flag("return_prompt_token_ids"),
        ignored=ignored,
    )


def make_request(
    context: RequestContext,
    rid: str,
    prompt_ids: list[int],
    parsed: ParsedSampling,
    options: RequestOptions,
) -> Request:
    """Put an engine request together from validated parts."""
    interval = parsed.stream_interval or context.stream_interval
    return Request(
        rid=rid,
        prompt_ids=prompt_ids,
        sampling=parsed.for_request(rid, context.random_seed),
        n=parsed.n,
        stream_interval=interval if options.stream else 0,
        priority=options.priority,
        namespace=options.namespace,
        logprobs=options.logprobs,
        grammar=parsed.grammar,
        dp_rank=options.dp_rank,
        received_ts=options.received_ts,
    )


def parse_rid(value: object, limits: Limits) -> str:
    """Check a request id.

    Raises:
        RequestError: it is no printable string of the allowed length.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise RequestError(f"rid must be a printable string, got {shown(value)}.", "rid")
    if not 1 <= len(value) <= limits.max_id_chars:
        raise RequestError(
            f"rid must have 1 to {limits.max_id_chars} characters, got {len(value)}.", "rid"
        )
    return value


def parse_namespace(extra_key: str | None, cache_salt: str | None, limits: Limits) -> str:
    """The prefix-cache namespace of two validated strings; "" is the common one.

    Raises:
        RequestError: one of them is too long.
    """
    for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if value is not None and len(value) > limits.max_namespace_chars:
            raise RequestError(
                f"{name} must have at most {limits.max_namespace_chars} characters, "
                f"got {len(value)}.",
                name,
            )
    if not extra_key and not cache_salt:
        return ""
    return json.dumps([extra_key or "", cache_salt or ""])


def parse_priority(value: object, context: RequestContext) -> int:
    """Check a priority: an integer of 32 bits, other than 0 only where priorities count.

    Raises:
        RequestError: it is none, or the server does not schedule by priority.
    """
    if value is None:
        return 0
    if not is_int(value) or not -(2**31) <= value < 2**31:  # type: ignore[operator]
        raise RequestError(f"priority must be a 32-bit integer, got {shown(value)}.", "priority")
    if value != 0 and not context.priority_scheduling:
        raise RequestError(
            f"priority {value} would have no effect: start the server with "
            "--schedule-policy priority, or leave it out.",
            "priority",
        )
    return int(value)  # type: ignore[call-overload, no-any-return]


def parse_prompts(
    body: Mapping[str, Any], context: RequestContext, new_tokens: int = 1
) -> tuple[list[list[int]], bool]:
    """Token ids of every row of `text` or `input_ids`, and whether the client sent a list of rows.

    Raises:
        RequestError: a row is malformed, or leaves no room for `new_tokens` tokens.
    """
    text, input_ids = body.get("text"), body.get("input_ids")
    if (text is None) == (input_ids is None):
        got = "neither" if text is None else "both"
        raise RequestError(f"exactly one of text and input_ids must be given, got {got}.", "text")
    if text is not None:
        name, is_batch = "text", isinstance(text, list)
        rows = text if is_batch else [text]
    else:
        name = "input_ids"
        is_batch = isinstance(input_ids, list) and any(isinstance(one, list) for one in input_ids)
        rows = input_ids if is_batch else [input_ids]
    names = [f"{name}[{row}]" if is_batch else name for row in range(len(rows))]
    if not 1 <= len(rows) <= context.limits.max_prompts:
        raise RequestError(
            f"{name} must have 1 to {context.limits.max_prompts} rows, got {len(rows)}.", name
        )
    prompts = tokenise(rows, names, context) if text is not None else rows
    for row_name, prompt in zip(names, prompts, strict=True):
        if text is None:
            parse_token_ids(prompt, row_name, context.limits, most=2**31)
        check_prompt(prompt, row_name, context.limits, new_tokens)
    return prompts, is_batch


def tokenise(texts: list[Any], names: Sequence[str], context: RequestContext) -> list[list[int]]:
    """Token ids of each text, with what the tokenizer puts around a text of its own (a BOS).

    Raises:
        RequestError: a row is no string, or holds what is not Unicode.
    """
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, str):
            raise RequestError(f"{name} must be a string, got {shown(text)}.", name)
        check_length(text, name, context.tokenizer, context.limits)
    try:
        return context.tokenizer.encode_batch(texts)
    except ValueError as error:
        raise RequestError(f"{names[0].partition('[')[0]}: {error}", names[0]) from error


def parse_rids(
    value: object, rows: Rows, limits: Limits, default: str | None
) -> tuple[str, list[str]]:
    """The id of the whole body and one per row; a batch's rows are numbered.

    Raises:
        RequestError: they are malformed, or not one per row.
    """
    if isinstance(value, list):
        if not rows.is_batch or len(value) != rows.count:
            raise RequestError(
                f"rid must be a string, or a list of {rows.count} for a batch of {rows.count}.",
                "rid",
            )
        rids = [parse_rid(one, limits) for one in value]
        if len(set(rids)) != len(rids):
            raise RequestError("Duplicate request ID detected in rid.", "rid")
        return uuid.uuid4().hex, rids
    rid = (default or uuid.uuid4().hex) if value is None else parse_rid(value, limits)
    return rid, [f"{rid}_{row}" for row in range(rows.count)] if rows.is_batch else [rid]


@dataclass(frozen=True, slots=True)
class Rows:
    """Fields that a batch may give once for all rows, or one value per row.

    Every method raises `RequestError` for a value of another type or number.
    """

    body: Mapping[str, Any]
    count: int
    is_batch: bool

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false, got {shown(value)}.", name)
        return bool(value)

    def of(self, name: str, kind: type[Value], default: Value | None = None) -> list[Any]:
        """One value per row, each null (then `default`) or of type `kind`, which is no list."""
        value = self.body.get(name)
        values = [value] * self.count
        if self.is_batch and isinstance(value, list):
            values = value
            if len(values) != self.count:
                raise RequestError(f"{name} has {len(values)} entries for {self.count} rows.", name)
        for one in values:
            if one is not None and not _is_a(one, kind):
                raise RequestError(f"{name} must be {_TYPE_WORDS[kind]}, got {shown(one)}.", name)
        return [default if one is None else one for one in values]

    def logprobs(
        self, prompts: Sequence[Sequence[int]], context: RequestContext
    ) -> list[LogprobRequest | None]:
        """The log-probs that each row wants, None for none."""
        limits = context.limits
        wanted = self.of("return_logprob", bool, False)
        starts = self.of("logprob_start_len", int, -1)
        tops = self.of("top_logprobs_num", int, 0)
        scored = self._scored_ids(limits)
        requests: list[LogprobRequest | None] = []
        for row, prompt in enumerate(prompts):
            start, top_n = starts[row], tops[row]
            if not -1 <= start <= len(prompt):
                raise RequestError(
                    f"logprob_start_len must be in [-1, {len(prompt)}] (the prompt's length), "
                    f"got {start}.",
                    "logprob_start_len",
                )
            if not 0 <= top_n <= limits.max_top_logprobs:
                raise RequestError(
                    f"top_logprobs_num must be in [0, {limits.max_top_logprobs}], got {top_n}.",
                    "top_logprobs_num",
                )
            prompt_start = start if 0 <= start < len(prompt) else None
            request = LogprobRequest(
                prompt_start, top_n, scored[row], processed=context.processed_logprobs
            )
            requests.append(request if wanted[row] else None)
        return requests

    def _scored_ids(self, limits: Limits) -> list[list[int]]:
        """`token_ids_logprob`: one flat list for all rows, or in a batch one list per row."""
        name = "token_ids_logprob"
        value = self.body.get(name)
        if self.is_batch and isinstance(value, list) and any(isinstance(x, list) for x in value):
            if len(value) != self.count:
                raise RequestError(f"{name} has {len(value)} entries for {self.count} rows.", name)
            rows = value
        else:
            rows = [value] * self.count
        most = limits.max_scored_ids
        return [[] if ids is None else parse_token_ids(ids, name, limits, most) for ids in rows]


_TYPE_WORDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "an integer",
    str: "a string",
    dict: "an object",
}


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
