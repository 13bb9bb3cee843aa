"""Parts of responses that chat completions and completions share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trunkline.engine.client import Sample, Stream
from trunkline.engine.messages import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Which token ids choices have besides their text."""

    prompt: bool = False
    output: bool = False

    def of_prompt(self, stream: Stream) -> dict[str, object]:
        """Keys of a choice, or of the first chunk of one."""
        return {"prompt_token_ids": stream.request.prompt_ids} if self.prompt else {}

    def of_output(self, ids: Sequence[int]) -> dict[str, object]:
        """Keys of a choice whose text comes from these tokens: two engines' names for one list."""
        return {"token_ids": ids, "response_token_ids": ids} if self.output else {}


def fingerprint(facts: EngineFacts | None) -> str | None:
    """Changes when the same request and seed may no longer give the same tokens."""
    if facts is None:
        return None
    return _digest(facts.model_path, facts.dtype, facts.device, facts.weight_version)


@lru_cache(maxsize=16)
def _digest(*parts: str) -> str:
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def usage(streams: Sequence[Stream], reasoning_tokens: int = 0) -> dict[str, object]:
    """Token counts: each prompt once, all samples' completions, of which some are reasoning.

    Cached tokens are those of the first sample of each prompt: the others share its prompt.
    """
    prompt = sum(len(stream.request.prompt_ids) for stream in streams)
    completion = sum(completion_tokens(s) for stream in streams for s in stream.samples)
    cached = 0
    for stream in streams:
        started = stream.samples[0].started
        if started is not None:
            cached += started.cached_device + started.cached_host
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "reasoning_tokens": reasoning_tokens,
    }


def prompt_usage(streams: Sequence[Stream]) -> dict[str, object]:
    """Token counts of an answer that generates nothing."""
    counted = usage(streams)
    prompt = counted["prompt_tokens"]
    details = counted["prompt_tokens_details"]
    return {"prompt_tokens": prompt, "total_tokens": prompt, "prompt_tokens_details": details}


def completion_tokens(sample: Sample) -> int:
    """Tokens of a sample so far, the stop token included."""
    return sample.finished.completion_tokens if sample.finished else len(sample.output_ids)


def finish(sample: Sample) -> dict[str, object]:
    """`finish_reason` and `matched_stop` of a sample; null while it runs."""
    end = sample.finished
    if end is None:
        return {"finish_reason": None, "matched_stop": None}
    reason = end.reason if end.reason in ("stop", "length") else "abort"
    return {"finish_reason": reason, "matched_stop": end.matched}


def metadata(streams: Iterable[Stream], weight_version: str) -> dict[str, object]:
    """Which weights made the tokens of the first sample."""
    first = next(iter(streams)).samples[0]
    span = {"version": weight_version, "start": 0, "end": completion_tokens(first)}
    return {"weight_version": weight_version, "weight_versions": [span]}
