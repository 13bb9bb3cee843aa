"""The Rust core through its Python face: messages, blocks and errors fit the Python definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from trunkline._core import VERSION, Core, CoreError, IntegrityError
from trunkline.engine.core_config import CoreConfig
from trunkline.engine.messages import (
    Accepted,
    Delta,
    Event,
    Finished,
    LogprobRequest,
    Logprobs,
    Refused,
    Resume,
    SamplingParams,
    Started,
    Submit,
)
from trunkline.plan import Array, Plan, encode_result

CLIENT = 3
CONFIG = CoreConfig(
    num_pages=20,
    max_running_requests=4,
    max_batch_tokens=64,
    max_context_len=200,
    vocab_size=1000,
    eos_token_ids=[2],
    arena_bytes=1 << 16,
)


def submit(key: int = 1, **fields: Any) -> bytes:
    sampling = SamplingParams(max_new_tokens=2, seed=2**64 - 1)
    message = Submit(key=key, rid=f"r{key}", prompt=[11, 12, 13], sampling=sampling)
    return msgspec.msgpack.encode(msgspec.structs.replace(message, **fields))


def events(core: Core) -> Iterator[Event]:
    for client, blob in core.take_events():
        assert client == CLIENT
        yield from msgspec.msgpack.decode(blob, type=list[Event])


def answer(plan: Plan, token: int) -> dict[str, Array]:
    """A result in which every sample is `token` and every log-prob minus one."""
    samples, tops = plan.sample_slot.size, int(plan.logit_top_n.sum())
    return {
        "sample_counts": np.ones(samples, np.int32),
        "token_ids": np.full(samples, token, np.int32),
        "sampled_logprobs": np.full(samples, -1, np.float32),
        "score_logprobs": np.full(plan.score_ids.size, -1, np.float32),
        "top_ids": np.full(tops, 5, np.int32),
        "top_logprobs": np.full(tops, -1, np.float32),
    }


def run(core: Core, now: float = 10.0) -> list[Event]:
    arena = np.zeros(CONFIG.arena_bytes, np.uint8)
    seen = list(events(core))
    token = 100
    while (step := core.plan(now, arena.data)) is not None:
        plan = Plan(arena)
        assert plan.step == step
        core.commit(now, encode_result(step, answer(plan, token)).data)
        core.check_integrity()
        seen += events(core)
        token += 1
    return seen


def test_a_request_from_submit_to_finished() -> None:
    core = Core(CONFIG.to_json())
    logprobs = LogprobRequest(prompt_start=1, top_n=1, ids=[7])
    assert core.submit(CLIENT, submit(logprobs=logprobs), 9.0) is None
    assert core.has_work()
    prompt = Logprobs([-1.0, -1.0], [[(-1.0, 5)], [(-1.0, 5)]], [[(-1.0, 7)], [(-1.0, 7)]])
    output = Logprobs([-1.0], [[(-1.0, 5)]], [[(-1.0, 7)]])
    started = Started(
        1, 0, 0, 0, forward_entry_time=10.0, prefill_finished_time=10.0, queue_time=1.0
    )
    last = Finished(
        *(1, 0, 1, [101], 0, "", output, None),
        reason="length",
        matched=None,
        message=None,
        status=0,
        completion_tokens=2,
        num_retractions=0,
        queue_time=1.0,
    )
    assert run(core) == [Accepted(1), started, Delta(1, 0, 0, [100], 0, "", output, prompt), last]
    assert not core.has_work()
    assert core.stats()["finished_sequences_total"] == 1


def test_refusals_reach_the_client() -> None:
    core = Core(CONFIG.to_json())
    core.submit(CLIENT, submit(prompt=[1] * 200), 9.0)
    core.submit(CLIENT, submit(2, prompt=[1000]), 9.0)
    too_long, unknown = events(core)
    assert isinstance(too_long, Refused)
    assert isinstance(unknown, Refused)
    assert (too_long.key, too_long.status, too_long.param) == (1, 400, "prompt")
    assert "longer than the model's context length" in too_long.message
    assert (unknown.kind, unknown.key) == ("invalid_request_error", 2)
    assert not core.has_work()


def test_prepared_resumed_and_aborted_requests() -> None:
    core = Core(CONFIG.to_json())
    request = core.submit(CLIENT, submit(must_prepare=True), 9.0)
    assert request is not None
    assert run(core) == []
    core.ready(request)
    core.submit(CLIENT, submit(2, resume=[Resume([50], 0)]), 9.0)
    core.submit(CLIENT, submit(3, n=2), 9.0)
    assert core.abort(CLIENT, 3, None) == 1
    assert core.abort(None, None, "nobody") == 0
    finished = {(e.key, e.sample): e for e in run(core) if isinstance(e, Finished)}
    assert sorted(finished) == [(1, 0), (2, 0), (3, 0), (3, 1)]
    assert (finished[2, 0].token_offset, finished[2, 0].completion_tokens) == (1, 2)
    assert [finished[3, sample].reason for sample in (0, 1)] == ["abort", "abort"]
    assert core.flush_cache()
    assert core.set_weight_epoch(1)


def test_misuse_is_a_core_error() -> None:
    core = Core(CONFIG.to_json())
    arena = np.zeros(CONFIG.arena_bytes, np.uint8)
    assert issubclass(IntegrityError, CoreError)
    assert VERSION
    with pytest.raises(CoreError, match="malformed"):
        core.submit(CLIENT, b"\xc0", 1.0)
    with pytest.raises(CoreError, match="no step"):
        core.commit(1.0, encode_result(1, {}).data)
    with pytest.raises(CoreError, match="abort takes"):
        core.abort(None, 1, None)
    with pytest.raises(CoreError, match="arena has 10 bytes"):
        core.plan(1.0, arena[:10].data)
    arena.flags.writeable = False
    with pytest.raises(BufferError):
        core.plan(1.0, arena.data)
    with pytest.raises(BufferError):
        core.commit(1.0, encode_result(1, {})[::2].data)
    with pytest.raises(CoreError, match="page_size is 0"):
        Core(CONFIG.to_json().replace(b'"page_size":16', b'"page_size":0'))
    with pytest.raises(CoreError, match="unknown field"):
        Core(CONFIG.to_json().replace(b'"page_size"', b'"pagesize"'))
    with pytest.raises(CoreError, match="tokenizer"):
        Core(CONFIG.to_json().replace(b'"tokenizer_json":null', b'"tokenizer_json":"{"'))
