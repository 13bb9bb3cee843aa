"""The embedded default model, end to end, against `transformers` on the same dequantised file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prompts import PROMPTS
from transformers import AutoModelForCausalLM

from trunkline import Engine
from trunkline.engine.weights.default_model import default_model_path


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        dtype="float32", quantization="none", max_total_tokens=8192, log_level="error"
    ) as started:
        yield started


def reference_outputs(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations by `transformers`, one prompt at a time."""
    path = Path(default_model_path())
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


def check_greedy(engine: Engine, prompts: tuple[str, ...], num_tokens: int) -> None:
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    answers = engine.generate(
        input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": num_tokens}
    )
    ours = [answer["output_ids"] for answer in answers]
    assert ours == reference_outputs(ids, num_tokens)


@pytest.mark.filterwarnings("ignore")  # transformers and torch warn about their own deprecations
def test_greedy_equals_transformers(engine: Engine) -> None:
    check_greedy(engine, PROMPTS[::13], 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_greedy_equals_transformers_on_fifty_prompts(engine: Engine) -> None:
    check_greedy(engine, PROMPTS, 64)


def test_a_question_gets_a_sensible_answer(engine: Engine) -> None:
    answer = engine.chat(
        [{"role": "user", "content": "What is the capital of France? Answer with one word."}],
        {"temperature": 0, "max_new_tokens": 24},
    )
    assert "Paris" in answer["text"]


STORY = "Once upon a time, in a small village by the sea,"
STOPPED = {"temperature": 0, "max_new_tokens": 48}


@pytest.fixture(scope="module")
def greedy(engine: Engine) -> tuple[str, list[str]]:
    """A greedy text and the texts of its tokens."""
    output = engine.generate(STORY, STOPPED)
    pieces = [engine.tokenizer.decode([token]) for token in output["output_ids"]]
    assert "".join(pieces) == output["text"], "choose a prompt whose tokens are whole characters"
    return output["text"], pieces


def slices(text: str, pieces: list[str]) -> dict[str, str]:
    """Stop strings: over several tokens, inside of one, over the border of two."""
    starts = [len("".join(pieces[:index])) for index in range(len(pieces))]
    long = next(i for i, piece in enumerate(pieces) if i > 5 and len(piece) >= 4)
    pair = next(
        i for i in range(6, len(pieces) - 1) if min(len(pieces[i]), len(pieces[i + 1])) >= 2
    )
    return {
        "over tokens": text[starts[8] + 1 : starts[8] + 9],
        "inside a token": pieces[long][1:3],
        "over a border": pieces[pair][-2:] + pieces[pair + 1][:2],
    }


@pytest.mark.parametrize("others", [[], ["never to be seen", "neither"]])
@pytest.mark.parametrize("kind", ["over tokens", "inside a token", "over a border"])
@pytest.mark.parametrize("interval", [1, 3])
def test_stop_strings_anywhere(
    engine: Engine, greedy: tuple[str, list[str]], kind: str, others: list[str], interval: int
) -> None:
    text, pieces = greedy
    stop = slices(text, pieces)[kind]
    expected = text[: text.index(stop)]
    params = {**STOPPED, "stop": [*others, stop], "stream_interval": interval}
    whole = engine.generate(STORY, params)
    assert whole["text"] == expected
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    generated = "".join(pieces[: whole["meta_info"]["completion_tokens"]])
    assert generated.endswith(stop) or stop in generated
    assert stop not in "".join(pieces[: whole["meta_info"]["completion_tokens"] - 1])
    seen = ""
    for chunk in engine.generate(STORY, params, stream=True):
        assert chunk["text"].startswith(seen), "nothing is taken back"
        assert expected.startswith(chunk["text"]), "nothing of the stop string leaks"
        seen = chunk["text"]
    assert seen == expected


Case = dict[str, Any]


def cases(count: int, num_tokens: int) -> list[Case]:
    """Requests of their own length and seed, every third one greedy."""
    return [
        {
            "prompt": prompt,
            "sampling_params": {
                "temperature": 0.0 if index % 3 == 0 else 0.8,
                "max_new_tokens": num_tokens + index % 5,
                "ignore_eos": True,
                "stop_token_ids": [0],  # rare, but it may end early: admission is optimistic
                "sampling_seed": index,
                "frequency_penalty": 0.3 * (index % 2),
            },
        }
        for index, prompt in enumerate((PROMPTS * 2)[:count])
    ]


def bits(outputs: list[Any]) -> list[Any]:
    """Token ids and their log-probs."""
    return [(o["output_ids"], o["meta_info"]["output_token_logprobs"]) for o in outputs]


def run_together(engine: Engine, requests: list[Case]) -> list[Any]:
    async def main() -> list[Any]:
        calls = [engine.async_generate(**case, return_logprob=True) for case in requests]
        return list(await asyncio.gather(*calls))

    return asyncio.run(main())


def check_same_bits(count: int, num_tokens: int, tiny_pool_tokens: int) -> None:
    """Alone, in a batch, from the cache, in chunks of 17 and after retraction, in the own dtype."""
    requests = cases(count, num_tokens)
    with Engine(max_total_tokens=8192, max_prefill_tokens=256, log_level="error") as engine:
        alone = []
        for case in requests:
            assert engine.flush_cache()
            alone.append(engine.generate(**case, return_logprob=True))
        assert engine.flush_cache()
        batched = run_together(engine, requests)
        assert bits(batched) == bits(alone)
        again = run_together(engine, requests)
        assert bits(again) == bits(alone)
        for output in again:
            meta = output["meta_info"]
            assert meta["cached_tokens"] == meta["prompt_tokens"] - 1
    with Engine(
        max_total_tokens=tiny_pool_tokens,
        chunked_prefill_size=17,
        max_prefill_tokens=256,
        schedule_conservativeness=0.01,
        log_level="error",
    ) as engine:
        outputs = run_together(engine, requests)
        assert bits(outputs) == bits(alone)
        assert sum(output["meta_info"]["num_retractions"] for output in outputs) > 0


def test_same_bits_however_it_is_computed() -> None:
    check_same_bits(count=6, num_tokens=24, tiny_pool_tokens=112)


@pytest.mark.slow
def test_same_bits_in_a_batch_of_32() -> None:
    check_same_bits(count=32, num_tokens=32, tiny_pool_tokens=400)
