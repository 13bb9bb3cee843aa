"""Same request, same tokens: alone, batched, chunked, from the cache, after retraction."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.checkpoints import tiny_tokenizer

from trunkline import Engine
from trunkline._core import Core
from trunkline.engine import launch
from trunkline.engine.local import EngineHost
from trunkline.engine.native_request import RequestContext, parse_generate
from trunkline.engine.runner import Runner
from trunkline.engine.validation import Limits
from trunkline.kernels.cpu.backend import THREADS_VARIABLE
from trunkline.plan import Plan

Case = dict[str, Any]
SETTINGS: dict[str, Any] = {"max_prefill_tokens": 256, "max_running_requests": 64}


def cases(count: int, seed: int, max_prompt: int, max_new: int) -> list[Case]:
    """Requests of random lengths; a third of the prompts begin alike, a third are greedy."""
    rng = random.Random(seed)
    common = [rng.randrange(5, 300) for _ in range(max_prompt)]
    made = []
    for index in range(count):
        length = rng.randint(1, max_prompt)
        prompt = [rng.randrange(5, 300) for _ in range(length)]
        if index % 3 == 0:
            shared = rng.randint(0, length - 1)
            prompt[:shared] = common[:shared]
        sampling = {
            "max_new_tokens": rng.randint(1, max_new),
            "sampling_seed": rng.randrange(2**63),
            "temperature": 0.0 if index % 3 == 1 else rng.uniform(0.5, 1.5),
            "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([-1, 40]),
            "frequency_penalty": rng.choice([0.0, 0.5]),
            "repetition_penalty": rng.choice([1.0, 1.2]),
        }
        made.append({"input_ids": prompt, "sampling_params": sampling})
    return made


def run(engine: Engine, requests: list[Case]) -> list[Any]:
    """All of them at once."""

    async def main() -> list[Any]:
        calls = [engine.async_generate(**case, return_logprob=True) for case in requests]
        return list(await asyncio.gather(*calls))

    return asyncio.run(main())


def run_alone(engine: Engine, requests: list[Case]) -> list[Any]:
    """One after another, each with an empty cache."""
    outputs = []
    for case in requests:
        assert engine.flush_cache()
        outputs.append(engine.generate(**case, return_logprob=True))
    return outputs


def tokens(outputs: list[Any]) -> list[Any]:
    """Token ids and their log-probs, bit for bit."""
    return [(o["output_ids"], o["meta_info"]["output_token_logprobs"]) for o in outputs]


@pytest.fixture(scope="module")
def requests() -> list[Case]:
    return cases(32, seed=1, max_prompt=90, max_new=40)


@pytest.fixture(scope="module")
def alone(tiny_model: str, requests: list[Case]) -> list[Any]:
    with Engine(tiny_model, max_total_tokens=8192, **SETTINGS) as engine:
        return tokens(run_alone(engine, requests))


def test_in_a_batch_and_from_the_cache(
    tiny_model: str, requests: list[Case], alone: list[Any]
) -> None:
    with Engine(tiny_model, max_total_tokens=8192, **SETTINGS) as engine:
        assert tokens(run(engine, requests)) == alone
        again = run(engine, requests)
        assert tokens(again) == alone
        for output in again:
            meta = output["meta_info"]
            assert meta["cached_tokens"] == meta["prompt_tokens"] - 1


def test_in_chunks_of_17(tiny_model: str, requests: list[Case], alone: list[Any]) -> None:
    settings = SETTINGS | {"chunked_prefill_size": 17}
    with Engine(tiny_model, max_total_tokens=8192, **settings) as engine:
        assert tokens(run(engine, requests)) == alone


def long_cases(count: int) -> list[Case]:
    """Requests that share a prefix longer than a split of attention (256 tokens)."""
    rng = random.Random(6)
    prefix = [rng.randrange(5, 300) for _ in range(300)]
    made = []
    for index in range(count):
        own = [rng.randrange(5, 300) for _ in range(rng.randint(1, 60))]
        sampling = {
            "max_new_tokens": rng.randint(2, 12),
            "sampling_seed": index,
            "temperature": 0.8 * (index % 2),
        }
        made.append({"input_ids": prefix + own, "sampling_params": sampling})
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_64_that_share_a_long_prefix_with_any_number_of_threads(
    tiny_model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = long_cases(64)
    expected: list[Any] = []
    for threads, chunk in (("1", -1), ("2", 50)):
        monkeypatch.setenv(THREADS_VARIABLE, threads)
        settings = SETTINGS | {"dtype": dtype, "chunked_prefill_size": chunk}
        with Engine(tiny_model, max_total_tokens=32_768, **settings) as engine:
            expected = expected or tokens(run_alone(engine, requests))
            assert engine.flush_cache()
            for _ in range(2):  # the second time from the cache
                assert tokens(run(engine, requests)) == expected


def test_after_retraction(tiny_model: str, requests: list[Case], alone: list[Any]) -> None:
    settings = SETTINGS | {"schedule_conservativeness": 0.01}
    with Engine(tiny_model, max_total_tokens=400, **settings) as engine:
        outputs = run(engine, requests)
        assert tokens(outputs) == alone
        assert sum(output["meta_info"]["num_retractions"] for output in outputs) > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_with_steps_planned_ahead(
    tiny_model: str, requests: list[Case], alone: list[Any], depth: int
) -> None:
    settings = SETTINGS | {"model_path": tiny_model, "max_total_tokens": 800}
    launched = launch.build(launch.engine_config(settings))
    core_config = replace(launched.core_config, overlap_depth=depth)
    overlapped = replace(launched, core_config=core_config, core=Core(core_config.to_json()))
    host = EngineHost(overlapped)
    try:
        outputs = host.run(_submitted(host, requests))
    finally:
        host.close()
    assert outputs == [output_ids for output_ids, _ in alone]


class FaultyRunner:
    """Fails every ninth step as a whole, before or after computing it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.steps = 0

    def forward(self, plan: Plan) -> None:
        self.steps += 1
        if self.steps % 18 == 9:
            raise RuntimeError("out of memory")
        self.runner.forward(plan)

    def awaits_earlier(self, plan: Plan) -> bool:
        return False

    def sample(self, plan: Plan, masks: Any = None) -> Any:
        result = self.runner.sample(plan, masks)
        if self.steps % 18 == 0:
            raise RuntimeError("lost")
        return result


def test_steps_that_fail_take_their_own_requests_only(
    tiny_model: str, requests: list[Case], alone: list[Any]
) -> None:
    settings = SETTINGS | {"model_path": tiny_model, "max_total_tokens": 4096}
    settings |= {"max_running_requests": 4}
    launched = launch.build(launch.engine_config(settings))
    faulty = replace(launched, runner=FaultyRunner(launched.runner))  # type: ignore[arg-type]
    host = EngineHost(faulty)
    try:
        outputs = host.run(_submitted(host, requests))
        launched.core.check_integrity()
        stats = launched.core.stats()
    finally:
        host.close()
    complete = 0
    for ours, (theirs, _) in zip(outputs, alone, strict=True):
        assert ours == theirs[: len(ours)]
        complete += ours == theirs
    assert complete >= stats["finished_sequences_total"] > 0
    assert stats["failed_sequences_total"] > 0
    assert stats["finished_sequences_total"] + stats["failed_sequences_total"] == len(requests)


async def _submitted(host: EngineHost, requests: list[Case]) -> list[list[int]]:
    client = await host.client()
    context = RequestContext(
        tokenizer=tiny_tokenizer(),
        limits=Limits(vocab_size=320, context_length=512),
        defaults={},
    )
    streams = [
        client.submit(request)
        for case in requests
        for request in parse_generate(case, context).requests
    ]
    await asyncio.gather(*(stream.finished() for stream in streams))
    return [stream.samples[0].output_ids for stream in streams]


@pytest.fixture(scope="module")
def many() -> list[Case]:
    return cases(200, seed=2, max_prompt=40, max_new=80)


@pytest.fixture(scope="module")
def many_alone(tiny_model: str, many: list[Case]) -> list[Any]:
    with Engine(tiny_model, max_total_tokens=8192, **SETTINGS) as engine:
        return run_alone(engine, many)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.usefixtures("slow_runner")
def test_a_tiny_pool_with_aborts_loses_nothing(
    tiny_model: str, policy: str, many: list[Case], many_alone: list[Any]
) -> None:
    rng = random.Random(3)
    aborted = {rng.randrange(200) for _ in range(40)}
    settings = SETTINGS | {"schedule_policy": policy, "schedule_conservativeness": 0.01}
    with Engine(tiny_model, max_total_tokens=192, **settings) as engine:
        outputs = asyncio.run(_torture(engine, many, aborted))
        stats: Any = engine.server_info()["stats"]
        assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
        ended = sum(stats[f"{how}_sequences_total"] for how in ("finished", "aborted", "failed"))
        assert ended == 200
        assert stats["failed_sequences_total"] == 0
        assert stats["retracted_requests_total"] > 0
        assert stats["evicted_tokens_total"] > 0
        engine.check_integrity()
        assert engine.flush_cache()
        stats = engine.server_info()["stats"]
        assert stats["free_tokens"] == stats["total_tokens"] == 192
    for index, (output, alone) in enumerate(zip(outputs, many_alone, strict=True)):
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            assert index in aborted
            assert output["output_ids"] == alone["output_ids"][: len(output["output_ids"])]
        else:
            assert tokens([output]) == tokens([alone])


async def _torture(engine: Engine, requests: list[Case], aborted: set[int]) -> list[Any]:
    rng = random.Random(4)

    async def one(index: int) -> Any:
        await asyncio.sleep(rng.uniform(0, 0.05))  # nearly all at once: memory runs out
        call = asyncio.ensure_future(
            engine.async_generate(**requests[index], return_logprob=True, rid=f"r{index}")
        )
        if index in aborted:
            await asyncio.sleep(rng.uniform(0, 0.3))
            engine.abort(f"r{index}")
        return await call

    return list(await asyncio.gather(*(one(index) for index in range(len(requests)))))
