"""The embedded default model, end to end, against `transformers` on the same dequantised file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.prompts import PROMPTS
from transformers import AutoModelForCausalLM

from trunkline import Engine
from trunkline.engine.weights.default_model import default_model_path


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", max_total_tokens=8192, log_level="error") as started:
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
