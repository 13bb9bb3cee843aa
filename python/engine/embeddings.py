"""Embeddings: bodies that want vectors -> engine requests, and pooled states -> vectors.

An embedding is the final hidden state of a prompt's last token, after the model's last norm, cut to
the dimensions asked for and scaled to length 1. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt

from trunkline.engine.client import Request, Sample, Stream
from trunkline.engine.messages import SamplingParams
from trunkline.engine.native_request import (
    BOOKKEEPING,
    RequestContext,
    RequestOptions,
    Rows,
    parse_namespace,
    parse_priority,
    parse_prompts,
    parse_rids,
)
from trunkline.engine.outputs import OutputOptions, prompt_meta_info
from trunkline.engine.ranks import FIELDS as RANK_FIELDS
from trunkline.engine.ranks import parse_rank
from trunkline.engine.validation import Limits, RequestError, is_int, refuse_unsupported, shown

SUPPORTED: Final = frozenset(
    (
        "text input_ids rid dimensions priority extra_key cache_salt "
        "routed_dp_rank data_parallel_rank"
    ).split()
)
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([],),
    "sampling_params": ({},),
    "lora_path": (),
    "return_pooled_hidden_states": (False,),
    "is_cross_encoder_request": (False,),
    "log_metrics": (True,),
    "background": (False,),
}
_NOTHING_NEW: Final = SamplingParams(temperature=0.0, max_new_tokens=0)


class PromptFields(TypedDict, total=False):
    """What `Engine.encode` may be told besides prompt and dimensions, as in `/encode`."""

    input_ids: list[int] | list[list[int]]
    rid: str | list[str]
    priority: int
    extra_key: str | list[str]
    cache_salt: str | list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeJob:
    """A parsed body. `rid` stands for all of it; `is_batch` says that the answer is a list."""

    rid: str
    requests: list[Request]
    is_batch: bool
    dimensions: int | None
    ignored: list[str]


def parse_encode(
    body: Any, context: RequestContext, *, default_rid: str | None = None
) -> EncodeJob:
    """Validate and tokenise an `/encode` body.

    Args:
        body: the decoded JSON document.
        context: tokenizer and limits.
        default_rid: id for a body that has no `rid`; None makes one.

    Raises:
        RequestError: the body cannot be served; the message names field, row and limit.
    """
    received_ts = time.time()
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(body)}.")
    refuse_unsupported(body, UNSUPPORTED)
    prompts, is_batch = parse_prompts(body, context, new_tokens=0)
    check_size(prompts, "text" if body.get("text") is not None else "input_ids", context.limits)
    rows = Rows(body, len(prompts), is_batch)
    rid, rids = parse_rids(body.get("rid"), rows, context.limits, default_rid)
    dimensions = parse_dimensions(body.get("dimensions"), context.limits)
    priority = parse_priority(body.get("priority"), context)
    dp_rank = parse_rank({name: body.get(name) for name in RANK_FIELDS}, context.dp_size)
    keys = zip(rows.of("extra_key", str), rows.of("cache_salt", str), strict=True)
    requests = [
        pooled_request(
            row_id,
            prompt,
            RequestOptions(
                priority=priority,
                namespace=parse_namespace(extra_key, cache_salt, context.limits),
                dp_rank=dp_rank,
                received_ts=received_ts,
            ),
        )
        for row_id, prompt, (extra_key, cache_salt) in zip(rids, prompts, keys, strict=True)
    ]
    known = SUPPORTED | UNSUPPORTED.keys() | BOOKKEEPING
    return EncodeJob(
        rid=rid,
        requests=requests,
        is_batch=is_batch,
        dimensions=dimensions,
        ignored=[key for key in body if key not in known],
    )


def check_size(prompts: Sequence[Sequence[int]], name: str, limits: Limits) -> None:
    """Check how many tokens one body may have embedded.

    Raises:
        RequestError: too many; the message has both numbers.
    """
    total = sum(map(len, prompts))
    most = max(limits.max_embedded_tokens, limits.context_length)
    if total > most:
        raise RequestError(
            f"{name} has {total} tokens in all, the limit is {most}: send them in several "
            "requests.",
            name,
        )


def parse_dimensions(value: object, limits: Limits) -> int | None:
    """The number of elements that an embedding is cut to; None: all of them.

    Raises:
        RequestError: the model's states do not have as many.
    """
    if value is None:
        return None
    most = limits.hidden_size
    if not is_int(value) or value < 1 or (most is not None and value > most):  # type: ignore[operator]
        words = "at least 1" if most is None else f"in [1, {most}] (the size of the model's states)"
        raise RequestError(
            f"dimensions must be an integer {words}, got {shown(value)}.", "dimensions"
        )
    return int(value)  # type: ignore[call-overload, no-any-return]


def pooled_request(rid: str, prompt_ids: list[int], options: RequestOptions) -> Request:
    """An engine request for the state of a prompt."""
    return Request(
        rid=rid,
        prompt_ids=prompt_ids,
        sampling=_NOTHING_NEW,
        stream_interval=0,
        priority=options.priority,
        namespace=options.namespace,
        dp_rank=options.dp_rank,
        pooled=True,
        received_ts=options.received_ts,
    )


def embedding(sample: Sample, dimensions: int | None) -> npt.NDArray[np.float32] | None:
    """The embedding of a prompt, [dimensions] float32 of length 1; None if it was aborted."""
    state = sample.finished.pooled_state if sample.finished else None
    if state is None:
        return None
    values = np.frombuffer(state, "<f4")[:dimensions].astype(np.float64)
    length = float(np.sqrt(np.square(values).sum()))
    return (values / length if length else values).astype(np.float32)


def encode_output(
    stream: Stream, now: float, dimensions: int | None, weight_version: str
) -> dict[str, object]:
    """Build the object that `/encode` returns for one prompt; its embedding is null if aborted."""
    [sample] = stream.samples
    vector = embedding(sample, dimensions)
    options = OutputOptions(weight_version=weight_version)
    return {
        "embedding": None if vector is None else vector.tolist(),
        "meta_info": prompt_meta_info(stream, sample, now, options),
    }
