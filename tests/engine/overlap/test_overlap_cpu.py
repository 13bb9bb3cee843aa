"""The CPU backend with its runner in a thread: the bits of every answer stay what they are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.overlap.runner_thread import THREAD_OVERLAP_DEPTH, RunnerThread

from trunkline import Engine
from trunkline._core import Core
from trunkline.engine import launch
from trunkline.engine.launch import LaunchedEngine

Case = dict[str, Any]
SETTINGS: dict[str, Any] = {"max_prefill_tokens": 128, "max_running_requests": 24}
GRAMMARS = (
    {"regex": "(cat|dog|horse) [0-9]{3}"},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
    {"ebnf": 'root ::= "(" root ")" | "x"'},
)


def in_a_thread(engine: LaunchedEngine) -> LaunchedEngine:
    """The same engine, with steps planned ahead of its runner's thread."""
    config = replace(engine.core_config, overlap_depth=THREAD_OVERLAP_DEPTH)
    runner: Any = RunnerThread(engine.runner)
    return replace(engine, core_config=config, core=Core(config.to_json()), runner=runner)


@pytest.fixture(scope="module")
def engines(tiny_model: str) -> Iterator[tuple[Engine, Engine]]:
    """One without overlap and one with; both retract sooner or later."""
    settings = SETTINGS | {"max_total_tokens": 320, "schedule_conservativeness": 0.01}
    build = launch.build
    with pytest.MonkeyPatch.context() as patch, Engine(tiny_model, **settings) as plain:
        patch.setattr(launch, "build", lambda *arguments: in_a_thread(build(*arguments)))
        with Engine(tiny_model, **settings) as ahead:
            yield plain, ahead


def run(engine: Engine, cases: list[Case]) -> list[Any]:
    async def main() -> list[Any]:
        calls = [engine.async_generate(**case, return_logprob=True) for case in cases]
        return list(await asyncio.gather(*calls))

    outputs = asyncio.run(main())
    assert engine.flush_cache(), "a step is still in flight"
    engine.check_integrity()
    return outputs


def seen(outputs: list[Any]) -> list[Any]:
    """Tokens, log-probs, texts and ends, bit for bit."""
    names = ("output_token_logprobs", "input_token_logprobs", "finish_reason")
    return [
        (one["output_ids"], one["text"], *(one["meta_info"].get(name) for name in names))
        for output in outputs
        for one in (output if isinstance(output, list) else [output])
    ]


def random_cases(count: int, seed: int) -> list[Case]:
    source = random.Random(seed)
    common = [source.randrange(5, 300) for _ in range(60)]
    cases = []
    for index in range(count):
        prompt = common[: source.randrange(60)] if index % 2 else []
        prompt += [source.randrange(5, 300) for _ in range(source.randint(1, 20))]
        sampling = {
            "max_new_tokens": source.randint(1, 40),
            "sampling_seed": source.getrandbits(63),
            "temperature": source.choice([0.0, 0.8, 1.3]),
            "top_p": source.choice([1.0, 0.9]),
            "frequency_penalty": source.choice([0.0, 0.4]),
            "repetition_penalty": source.choice([1.0, 1.2]),
            "n": source.choice([1, 1, 3]),
        }
        if index % 3 == 0:
            sampling |= source.choice(GRAMMARS)
        cases.append({"input_ids": prompt, "sampling_params": sampling})
    return cases


def test_random_requests(engines: tuple[Engine, Engine]) -> None:
    plain, ahead = engines
    cases = random_cases(60, seed=4)
    expected = seen(run(plain, cases))
    assert seen(run(ahead, cases)) == expected
    assert ahead.server_info()["stats"]["retracted_requests_total"] > 0


def test_every_late_stop(engines: tuple[Engine, Engine]) -> None:
    """A stop is seen when the next step is under way already, wherever it comes."""
    plain, ahead = engines
    prompt, sampling = [9, 8, 7], {"max_new_tokens": 24, "sampling_seed": 5, "ignore_eos": True}
    output: Any = plain.generate(input_ids=prompt, sampling_params=sampling)
    cases: list[Case] = []
    for place, token_id in enumerate(output["output_ids"]):
        stops: list[Case] = [{"stop_token_ids": [token_id]}, {"max_new_tokens": place + 1}]
        stops.append({"stop": [output["text"][place : place + 2] or "?"]})
        cases += [{"input_ids": prompt, "sampling_params": sampling | stop} for stop in stops]
    expected = seen(run(plain, cases))
    assert seen(run(ahead, cases)) == expected
    assert len({len(ids) for ids, *_ in expected}) > 10


def test_every_abort(engines: tuple[Engine, Engine]) -> None:
    """Requests aborted after each number of tokens have what they would have had until then."""
    plain, ahead = engines
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "ignore_eos": True}
    cases = [
        {"input_ids": [5, 6, 7 + index], "sampling_params": sampling | {"sampling_seed": index}}
        for index in range(24)
    ]
    whole = [one["output_ids"] for one in run(plain, cases)]

    async def one(index: int) -> Any:
        rid = f"abort-{index}"
        call: Any = ahead.async_generate(**cases[index], rid=rid, stream=True)
        async for output in await call:
            if len(output["output_ids"]) > index:
                ahead.abort(rid)
        return output

    async def main() -> list[Any]:
        return list(await asyncio.gather(*(one(index) for index in range(24))))

    outputs = asyncio.run(main())
    for index, output in enumerate(outputs):
        ids = output["output_ids"]
        assert index < len(ids)
        assert ids == whole[index][: len(ids)]
    ends = [output["meta_info"]["finish_reason"]["type"] for output in outputs]
    assert "abort" in ends
    assert ahead.flush_cache()
    ahead.check_integrity()
    stats = ahead.server_info()["stats"]
    assert stats["free_tokens"] == stats["total_tokens"]
