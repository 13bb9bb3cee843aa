"""What Gemma-2 and -3 have and others have not: it changes results, on every backend the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.tiny import MemoryCheckpoint, memory_checkpoint, tiny_runner

from trunkline.engine.runner import Runner
from trunkline.engine.weights.dummy import DummyWeights

BACKENDS = ("torch", "cpu")
VOCABULARY = 199
# What is left of a checkpoint's config when one part of the architecture is taken out.
WITHOUT: dict[str, dict[str, Any]] = {
    "the soft cap of scores": {"attention_soft_cap": None},
    "the soft cap of logits": {"logit_soft_cap": None},
    "the scale of scores": {"attention_scale": None},
    "the scale of the embedding": {"embedding_scale": 1.0},
    "the offset of norms": {"norm_offset": 0.0},
    "gelu": {"hidden_act": "silu"},
    "the window": {"sliding_window": None, "sliding_layers": ()},
    "the alternation of layers": {"sliding_layers": (False, True, False)},
}


def prompt(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def logprobs(runner: Runner, prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    """[prompts, vocabulary] of what follows each prompt."""
    sequences = [Sequence(prompt) for prompt in prompts]
    Driver(runner, top_n=VOCABULARY).generate(sequences, 1)
    found = np.zeros((len(prompts), VOCABULARY))
    for row, sequence in zip(found, sequences, strict=True):
        ids, values = zip(*sequence.tops[0], strict=True)
        row[list(ids)] = values
    return found


@cache
def whole(backend: str) -> np.ndarray[Any, Any]:
    return logprobs(tiny_runner(memory_checkpoint("gemma2"), backend=backend), [prompt(90)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", WITHOUT)
def test_each_part_matters(part: str, backend: str) -> None:
    """Otherwise comparisons with `transformers` would pass without it."""
    runner = tiny_runner(memory_checkpoint("gemma2", **WITHOUT[part]), backend=backend)
    assert np.abs(logprobs(runner, [prompt(90)]) - whole(backend)).max() > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rope_of_layers_with_a_window_matters(backend: str) -> None:
    """Gemma-3's are turned by a rope of their own."""
    found = [
        logprobs(tiny_runner(memory_checkpoint("gemma3", **changes), backend=backend), [prompt(90)])
        for changes in ({}, {"sliding_rope": None})
    ]
    assert np.abs(found[0] - found[1]).max() > 0.01


def large(factor: float) -> MemoryCheckpoint:
    """Queries and embedding made so large that both caps saturate."""
    made = memory_checkpoint("gemma2")
    for name, tensor in made.weights.items():
        if "q_proj" in name or "embed_tokens" in name:
            made.weights[name] = tensor * factor
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caps_bound_scores_and_logits_of_any_size(dtype: str) -> None:
    """Logits span at most twice their cap, and log-probs stay finite."""
    made = large(1e4)
    prompts = [prompt(length) for length in (1, 40, 130)]
    results = [logprobs(tiny_runner(made, backend=b, dtype=dtype), prompts) for b in BACKENDS]
    cap = made.config.logit_soft_cap
    assert cap is not None
    for found in results:
        assert np.isfinite(found).all()
        spans = found.max(-1) - found.min(-1)
        assert (spans <= 2 * cap + 1e-4).all()
        assert (spans > 1.9 * cap).all()
    if dtype == "float32":
        # Nearly every logit is at its cap: signs decide, and near zero they may differ.
        assert (np.abs(results[0] - results[1]) < 1e-3).mean() > 0.98


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_any_chunk_and_of_the_cache(dtype: str, backend: str) -> None:
    """Prompts and prefixes reach beyond the window, which is 37 keys."""
    runner = tiny_runner(memory_checkpoint("gemma2"), dtype=dtype, backend=backend)
    runs = []
    for chunk in (None, 29, 1):
        made = [Sequence(prompt(length, length)) for length in (100, 38, 5)]
        driver = Driver(runner, top_n=5)
        driver.generate(made, 6, chunk=chunk)
        driver.release(made)
        runs.append([(s.output, s.logprobs, s.tops) for s in made])
    assert runs[1:] == [runs[0]] * 2
    driver = Driver(runner, top_n=5)
    donor, cached = Sequence(prompt(100, 100)), Sequence(prompt(100, 100))
    driver.generate([donor], 6)
    driver.share_prefix(donor, cached, 83)
    driver.generate([cached], 6)
    assert (cached.output, cached.logprobs, cached.tops) == runs[0][0]


def test_norms_have_their_offset_in_float32() -> None:
    """A weight of bfloat16 plus one needs more bits than bfloat16 has."""
    made = memory_checkpoint("gemma2")
    rounded = {name: tensor.bfloat16() for name, tensor in made.weights.items()}
    given = logprobs(tiny_runner(replace(made, weights=rounded), backend="cpu"), [prompt(50)])
    folded = {
        name: (1 + tensor.float()).bfloat16() if name.endswith("norm.weight") else tensor
        for name, tensor in rounded.items()
    }
    config = replace(made.config, norm_offset=0.0)
    other = logprobs(tiny_runner(MemoryCheckpoint(config, folded), backend="cpu"), [prompt(50)])
    assert np.abs(given - other).max() > 1e-4
    exact = {
        name: 1 + tensor.float() if name.endswith("norm.weight") else tensor
        for name, tensor in rounded.items()
    }
    same = logprobs(tiny_runner(MemoryCheckpoint(config, exact), backend="cpu"), [prompt(50)])
    assert np.array_equal(given, same)


def test_the_embedding_scale_is_rounded_to_the_dtype() -> None:
    """The root of 48 is 6.928, and 6.9375 in bfloat16."""
    results = [
        logprobs(
            tiny_runner(
                memory_checkpoint("gemma2", embedding_scale=scale), dtype="bfloat16", backend="cpu"
            ),
            [prompt(20)],
        )
        for scale in (48**0.5, 6.9375)
    ]
    assert np.array_equal(*results)


def test_dummy_norms_multiply_by_one() -> None:
    config = memory_checkpoint("gemma2").config
    for name, tensor in DummyWeights(config).tensors():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
