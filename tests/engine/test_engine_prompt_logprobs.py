"""Prompt log-probs: the same bits from every start, in any order, cached, chunked or retracted."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from trunkline import Engine

SCORED = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [7, 300]}
BLOCKS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    common = [rng.randrange(5, 300) for _ in range(150)]
    tails = [[rng.randrange(5, 300) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
    return [common + tail for tail in tails] + [common[:70]]


def fields(prompt: list[int], start: int, n: int = 1) -> dict[str, Any]:
    sampling = {"max_new_tokens": 3, "ignore_eos": True, "sampling_seed": 1, "n": n}
    scored = {**SCORED, "logprob_start_len": start} if start >= 0 else {}
    return {"input_ids": prompt, "sampling_params": sampling, **scored}


def blocks(output: Any) -> list[Any]:
    return [output["meta_info"][name] for name in BLOCKS]


@pytest.mark.parametrize("pool", [4096, 512])  # plenty, and too few for all at once
@pytest.mark.parametrize("chunk", [256, 17])
def test_prompt_logprobs_depend_on_the_prompt_alone(tiny_model: str, pool: int, chunk: int) -> None:
    rng = random.Random(pool + chunk)
    with Engine(
        tiny_model, max_total_tokens=pool, max_prefill_tokens=chunk, log_level="error"
    ) as engine:
        whole = []
        for prompt in prompts():
            assert engine.flush_cache()
            whole.append(blocks(engine.generate(**fields(prompt, 0))))
            assert [len(block) for block in whole[-1]] == [len(prompt)] * 3
        wanted = [
            (index, rng.choice([-1, 0, 1, 15, 16, 17, 69, len(prompt) - 1, len(prompt)]))
            for index, prompt in enumerate(prompts())
            for _ in range(8)
        ]
        rng.shuffle(wanted)

        async def ask(index: int, start: int) -> Any:
            return await engine.async_generate(**fields(prompts()[index], start, n=1 + index % 2))

        async def main() -> list[Any]:
            return await asyncio.gather(*(ask(*one) for one in wanted))

        for (index, start), answer in zip(wanted, asyncio.run(main()), strict=True):
            outputs = answer if isinstance(answer, list) else [answer]
            for output in outputs if start >= 0 else []:
                assert blocks(output) == [block[start:] for block in whole[index]], (index, start)
        engine.check_integrity()
        assert engine.flush_cache()
