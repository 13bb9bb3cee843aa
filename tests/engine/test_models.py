"""The decoder against transformers, and what loading refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.tiny import (
    FAMILIES,
    memory_checkpoint,
    reference_model,
    tiny_runner,
)


def prompts(count: int, seed: int, longest: int = 200) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, count)
    return [generator.integers(0, 199, length).tolist() for length in lengths]


def reference_logits(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    """Logits that each output token was chosen from, [outputs, V].

    If the tokens are their arg-max throughout, greedy decoding gives exactly these tokens.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([sequence.tokens])).logits[0]
    return logits[len(sequence.prompt) - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    runner = tiny_runner(memory_checkpoint(family))
    model = reference_model(family)
    sequences = [Sequence(prompt) for prompt in prompts(3, seed=1)]
    driver = Driver(runner, top_n=20)
    driver.generate(sequences, 64)
    for sequence in sequences:
        logits = reference_logits(model, sequence)
        assert sequence.output == logits.argmax(-1).tolist()
        expected = torch.log_softmax(logits, -1)
        for row, top in enumerate(sequence.tops):
            ids = [token for token, _ in top]
            values = torch.tensor([value for _, value in top])
            torch.testing.assert_close(values, expected[row, ids], atol=1e-4, rtol=1e-4)
