"""Soft cap, sinks, scale and window of attention: against float64, and the same bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.attention_model import (
    VOCABULARY,
    Layer,
    attention_driver,
    logprobs,
    naive_logprobs,
)
from tests.kernels.driver import Sequence

from trunkline.kernels import AttentionSpec

LAYERS = {
    "plain": Layer(),
    "scale": Layer(scale=0.11),
    "soft cap": Layer(soft_cap=5.0, spread=0.5),
    "soft cap that saturates": Layer(soft_cap=0.5, spread=1.0),
    "sinks": Layer(sinks=True),
    "all": Layer(sinks=True, soft_cap=3.0, scale=0.3, window=70, head_dim=24, num_heads=2),
    "plain pages": Layer(sinks=True, soft_cap=3.0, page_size=8),
}
BACKENDS = ("torch", "cpu")
# bfloat16 is compared on log-probs whose spread is about 2.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.15}


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(4)
    return [generator.integers(0, VOCABULARY, n).tolist() for n in (1, 17, 64, 130, 257, 530)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, backend: str) -> None:
    sequences = [Sequence(prompt) for prompt in prompts()]
    attention_driver(LAYERS[name], backend, dtype).generate(sequences, 3)
    for sequence in sequences:
        for index in range(3):
            known = sequence.prompt + sequence.output[:index]
            expected = naive_logprobs(LAYERS[name], known).numpy()
            np.testing.assert_allclose(
                logprobs(sequence, index), expected, rtol=0, atol=TOLERANCE[dtype]
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_in_any_chunk_and_batch(name: str, backend: str) -> None:
    driver = attention_driver(LAYERS[name], backend, torch.bfloat16)
    runs = []
    for chunk in (None, 100, 33):
        sequences = [Sequence(prompt) for prompt in prompts()]
        driver.generate(sequences, 3, chunk=chunk)
        driver.release(sequences)
        runs.append([sequence.tops for sequence in sequences])
    alone = []
    for prompt in prompts():
        sequence = Sequence(prompt)
        driver.generate([sequence], 3)
        driver.release([sequence])
        alone.append(sequence.tops)
    assert runs == [alone] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_option_matters(backend: str) -> None:
    """Otherwise the comparisons above would pass without them."""
    base = Layer()
    changed = [
        Layer(soft_cap=1.0),
        Layer(sinks=True),
        Layer(scale=0.5),
        Layer(window=20),
    ]
    results = []
    for layer in (base, *changed):
        sequence = Sequence(prompts()[3])
        attention_driver(layer, backend, torch.float32).generate([sequence], 1)
        results.append(logprobs(sequence, 0))
    for result in results[1:]:
        assert np.abs(result - results[0]).max() > 0.05


@pytest.mark.parametrize("option", [{"window": 0}, {"window": -1}, {"soft_cap": 0.0}])
def test_what_would_be_taken_for_none_is_refused(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} is .* or None for"):
        AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=16, rotary=None, **option)  # type: ignore[arg-type]
