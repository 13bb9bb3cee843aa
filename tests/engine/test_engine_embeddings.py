"""Embeddings and scores of embedded engines: right, and the same bits however they come about."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.checkpoints import TinyCheckpoint

from trunkline import Engine, RequestError


def prompts(count: int) -> list[list[int]]:
    """Random lengths; half of them begin alike."""
    rng = random.Random(4)
    common = [rng.randrange(5, 300) for _ in range(120)]
    return [
        common[: rng.randrange(0, 120) if index % 2 else 0]
        + [rng.randrange(5, 300) for _ in range(rng.randrange(1, 90))]
        for index in range(count)
    ]


def embed(engine: Engine, rows: list[list[int]], others: int = 0) -> list[Any]:
    """The embeddings of rows that are submitted at once, beside requests that generate."""

    async def main() -> list[Any]:
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        noise = [
            engine.async_generate(input_ids=row, sampling_params=sampling) for row in rows[:others]
        ]
        outputs = await asyncio.gather(engine.async_encode(input_ids=rows), *noise)
        return [row["embedding"] for row in outputs[0]]

    return asyncio.run(main())


@pytest.mark.parametrize("dtype", ["bfloat16", "half"])  # of the cpu backend, of the torch backend
def test_bits_depend_on_the_prompt_alone(tiny_model: str, dtype: str) -> None:
    rows = prompts(24)
    settings: dict[str, Any] = {"dtype": dtype, "log_level": "error"}
    with Engine(tiny_model, max_total_tokens=8192, **settings) as engine:
        alone = []
        for row in rows:
            assert engine.flush_cache()
            alone.append(engine.encode(input_ids=row)["embedding"])
        assert embed(engine, rows) == alone
        cached = engine.encode(input_ids=rows)
        assert [row["embedding"] for row in cached] == alone
        assert all(
            row["meta_info"]["cached_tokens"] == len(prompt) - 1
            for row, prompt in zip(cached, rows, strict=True)
        )
        engine.check_integrity()
    with Engine(tiny_model, max_total_tokens=400, max_prefill_tokens=19, **settings) as engine:
        assert embed(engine, rows, others=12) == alone
        engine.check_integrity()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_they_are_the_last_hidden_states_of_transformers(tmp_path: Path, family: str) -> None:
    path = str(TinyCheckpoint(family=family).write(tmp_path / family))
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with Engine(path, max_total_tokens=2048, log_level="error") as engine:
        for row in prompts(6):
            with torch.inference_mode():
                states = reference.model(torch.tensor([row])).last_hidden_state[0, -1]
            for dimensions in (None, 10):
                cut = states[:dimensions]
                expected = (cut / cut.norm()).numpy()
                ours = engine.encode(input_ids=row, dimensions=dimensions)["embedding"]
                np.testing.assert_allclose(ours, expected, atol=1e-4)
                assert np.linalg.norm(ours) == pytest.approx(1)
        texts = ["The quick brown fox", "jumps"]
        ids = engine.tokenizer.encode_batch(texts)
        whole = [row["embedding"] for row in engine.encode(texts)]
        assert whole == [row["embedding"] for row in engine.encode(input_ids=ids)]


def test_scores_are_the_chances_of_the_labels(tmp_path: Path) -> None:
    path = str(TinyCheckpoint().write(tmp_path / "model"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    query, items, labels = [7, 8, 9], [[10, 11], [12]], [30, 5, 30]
    with Engine(path, max_total_tokens=2048, log_level="error") as engine:
        for temperature in (1.0, 3.0):
            logits = []
            for item in items:
                with torch.inference_mode():
                    output = reference(torch.tensor([[*query, *item]]))
                logits.append(output.logits[0, -1] / temperature)
            chances = torch.softmax(torch.stack(logits), -1)[:, labels]
            ours = engine.score(query, items, labels, temperature=temperature)
            np.testing.assert_allclose(ours, chances, rtol=2e-3)
            among = engine.score(query, items, labels, temperature=temperature, apply_softmax=True)
            np.testing.assert_allclose(among, chances / chances.sum(-1, keepdim=True), rtol=2e-3)
        first = engine.score(query, items, labels, item_first=True)
        assert first == engine.score([], [[*item, *query] for item in items], labels)
        assert engine.score("The", "quick", labels) == [
            asyncio.run(engine.async_score("", ["Thequick"], labels))[0]
        ]


def test_wrong_calls_say_what_is_wrong(tiny_model: str) -> None:
    with Engine(tiny_model, max_total_tokens=2048, log_level="error") as engine:
        with pytest.raises(RequestError, match="no reranker"):
            engine.rerank("the", ["of", "to"])
        with pytest.raises(RequestError, match=r"dimensions must be an integer in \[1, 64\]"):
            engine.encode("the", dimensions=65)
        with pytest.raises(TypeError, match="colour"):
            engine.encode("the", colour="red")  # type: ignore[call-arg]
        with pytest.raises(RequestError, match="label_token_ids"):
            engine.score("the", "of", [320])
        with pytest.raises(RequestError, match="512 tokens"):
            engine.encode(input_ids=[7] * 513)
        assert len(engine.encode(input_ids=[7] * 512)["embedding"]) == 64
