"""What `/generate` and `Engine.generate` return: one sample as a dict with its `meta_info`.

Pure functions of a stream's state. Every `meta_info` key is always present, null where it has no
value yet; times are unix seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from trunkline.engine.client import Request, Sample, Stream, Update
from trunkline.engine.messages import Finished, Logprobs, Started
from trunkline.engine.validation import RequestError

# What an impossible token's log-prob is reported as: JSON has no infinity.
LOWEST_LOGPROB: Final = -9999.0

Triple = list[float | int | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How outputs are written.

    `streamed` outputs count latency to the first token seen by the client, others to the first
    token made. `incremental` ones hold only what is new in the given update. `token_text` turns a
    token id into the text beside its log-prob; None leaves null there.
    """

    weight_version: str = "default"
    streamed: bool = False
    incremental: bool = False
    token_text: Callable[[int], str] | None = None
    prompt_token_ids: bool = False


def generate_output(
    stream: Stream,
    sample: Sample,
    now: float,
    options: OutputOptions,
    *,
    update: Update | None = None,
    index: int | None = None,
) -> dict[str, object]:
    """Build the object that `/generate` returns for one sample.

    Args:
        stream: the request in flight or finished.
        sample: one of its samples.
        now: when the object is handed out (unix seconds).
        options: how it is written.
        update: what is new; needed by, and only used for, incremental outputs.
        index: position in a batch, to be shown in it; None leaves the key out.
    """
    if options.incremental:
        if update is None:
            raise ValueError("an incremental output needs its update")
        text, output_ids = update.text, update.token_ids
    else:
        text, output_ids = sample.text, list(sample.output_ids)
    meta = _meta_info(stream, sample, now, options)
    if stream.request.logprobs is not None:
        meta |= _logprob_blocks(stream.request, sample, options, update)
    output: dict[str, object] = {"text": text, "output_ids": output_ids, "meta_info": meta}
    if options.prompt_token_ids:
        output["prompt_token_ids"] = stream.request.prompt_ids
    if index is not None:
        output["index"] = index
    return output


def sample_id(request: Request, index: int) -> str:
    """Public id of one sample: the request's, with `_k` when there are several."""
    return request.rid if request.n == 1 else request.sample_rid(index)


def finish_reason(finished: Finished | None) -> dict[str, object] | None:
    """The `finish_reason` object; None while the sample runs."""
    if finished is None:
        return None
    if finished.reason == "stop":
        return {"type": "stop", "matched": finished.matched}
    if finished.reason == "length":
        return {"type": "length", "length": finished.completion_tokens}
    return {
        "type": "abort",
        "message": finished.message or "the request was aborted",
        "status_code": finished.status or None,
        "err_type": "InternalServerError" if finished.reason == "error" else None,
    }


def unanswered(sample: Sample) -> RequestError:
    """Why a sample that ended has no answer: it failed, or somebody aborted it."""
    end = sample.finished
    message = (end.message if end else None) or "the request was aborted"
    status = (end.status if end else 0) or 400
    return RequestError(f"there is no answer: {message}", status=status, code="no_answer")


# Facts of answers that have no text of their own.
_OF_PROMPTS: Final = (
    "id finish_reason prompt_tokens cached_tokens cached_tokens_details weight_version "
    "num_retractions dp_rank forward_entry_time prefill_finished_time queue_time e2e_latency "
    "request_received_ts api_server_dispatch_finish_ts request_finished_ts "
    "response_sent_to_client_ts"
).split()


def prompt_meta_info(
    stream: Stream, sample: Sample, now: float, options: OutputOptions
) -> dict[str, object]:
    """The `meta_info` of an answer that says something of its prompt, and generates nothing."""
    facts = _meta_info(stream, sample, now, options)
    return {name: facts[name] for name in _OF_PROMPTS}


def _meta_info(
    stream: Stream, sample: Sample, now: float, options: OutputOptions
) -> dict[str, object]:
    request, started, finished = stream.request, sample.started, sample.finished
    completion_tokens = finished.completion_tokens if finished else len(sample.output_ids)
    first_ts = first_token_ts(sample, streamed=options.streamed)
    versions = [{"version": options.weight_version, "start": 0, "end": completion_tokens}]
    return {
        "id": sample_id(request, sample.index),
        "finish_reason": finish_reason(finished),
        "prompt_tokens": len(request.prompt_ids),
        "weight_version": options.weight_version,
        "num_retractions": sample.num_retractions,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": started.forward_entry_time if started else None,
        "prefill_finished_time": started.prefill_finished_time if started else None,
        "queue_time": _queue_time(started, finished),
        "reasoning_tokens": 0,
        "completion_tokens": completion_tokens,
        "cached_tokens": started.cached_device + started.cached_host if started else 0,
        "weight_versions": versions if finished else None,
        "cached_tokens_details": _cached_details(started),
        "dp_rank": stream.dp_rank,
        "e2e_latency": _difference(sample.finished_ts, request.received_ts),
        "request_received_ts": request.received_ts,
        "first_token_latency": _difference(first_ts, request.received_ts),
        "api_server_dispatch_finish_ts": stream.dispatched_ts,
        "request_finished_ts": sample.finished_ts,
        "decode_throughput": _decode_throughput(sample, completion_tokens, first_ts),
        "response_sent_to_client_ts": now,
    }


def first_token_ts(sample: Sample, *, streamed: bool) -> float | None:
    """When the first token was there: seen by the client of a stream, else made by the engine."""
    if streamed or sample.started is None:
        return sample.first_token_ts
    return sample.started.prefill_finished_time


def _queue_time(started: Started | None, finished: Finished | None) -> float | None:
    if finished is not None:
        return finished.queue_time
    return started.queue_time if started else None


def _cached_details(started: Started | None) -> dict[str, int] | None:
    if started is None or started.cached_device + started.cached_host == 0:
        return None
    return {"device": started.cached_device, "host": started.cached_host}


def _difference(later: float | None, earlier: float) -> float | None:
    return None if later is None else later - earlier


def _decode_throughput(sample: Sample, tokens: int, first_ts: float | None) -> float | None:
    if sample.finished_ts is None or first_ts is None or tokens <= 1:
        return None
    elapsed = sample.finished_ts - first_ts
    return (tokens - 1) / elapsed if elapsed > 0 else None


def _logprob_blocks(
    request: Request, sample: Sample, options: OutputOptions, update: Update | None
) -> dict[str, object]:
    """The log-prob lists of `meta_info`; the first of incremental outputs has the prompt's."""
    output_ids, logprobs = sample.output_ids, sample.output_logprobs
    prompt = sample.prompt_logprobs
    if options.incremental and update is not None:
        output_ids, logprobs = update.token_ids, update.logprobs
        prompt = prompt if update.token_offset == 0 else None
    blocks = _blocks("output", request, output_ids, logprobs, options)
    blocks["output_token_logprobs_length"] = len(logprobs.values) if logprobs else 0
    assert request.logprobs is not None
    prompt_ids = request.prompt_ids[request.logprobs.prompt_start or 0 :]
    return _blocks("input", request, prompt_ids, prompt, options) | blocks


def _blocks(
    side: str,
    request: Request,
    ids: Sequence[int],
    logprobs: Logprobs | None,
    options: OutputOptions,
) -> dict[str, object]:
    """`<side>_token_logprobs`, and top and chosen-id lists when the request asked for them."""
    assert request.logprobs is not None
    logprobs = logprobs or Logprobs([])

    def triple(logprob: float, token_id: int) -> Triple:
        text = options.token_text(token_id) if options.token_text else None
        return [reported_logprob(logprob), token_id, text]

    def triples(pairs: list[tuple[float, int]]) -> list[Triple] | None:
        return [triple(*pair) for pair in pairs if math.isfinite(pair[0])] or None

    blocks: dict[str, object] = {
        f"{side}_token_logprobs": [
            triple(value, token_id) for value, token_id in zip(logprobs.values, ids, strict=False)
        ]
    }
    if request.logprobs.top_n:
        blocks[f"{side}_top_logprobs"] = [triples(pairs) for pairs in logprobs.top]
    if request.logprobs.ids:
        blocks[f"{side}_token_ids_logprobs"] = [triples(pairs) for pairs in logprobs.ids]
    return blocks


def reported_logprob(logprob: float) -> float | None:
    """A number that JSON can hold: None for NaN (nothing precedes the token)."""
    return None if math.isnan(logprob) else max(logprob, LOWEST_LOGPROB)
