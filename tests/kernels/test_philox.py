"""Philox4x32-10 against Random123's published known answers, and the noise made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trunkline.kernels.torch_reference.philox import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    gumbel_blocks,
    philox,
)

# counter words, key words, result words
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.int64) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    result = philox(words(counter), words(key))
    assert tuple(int(word) for word in result) == expected


def naive_gumbel(seed: int, position: int, token: int) -> float:
    key = [seed & 0xFFFFFFFF, seed >> 32]
    counter = [token >> 2, position, 0, 0]
    for _ in range(10):
        high0, low0 = divmod(counter[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(counter[2] * 0xCD9E8D57, 1 << 32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % (1 << 32), (key[1] + 0xBB67AE85) % (1 << 32)]
    uniform = ((counter[token & 3] >> 8) + 0.5) * 2.0**-24
    return -math.log(-math.log(uniform))


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 1, 2**63, 2**64 - 1])
def test_noise_is_a_function_of_seed_position_and_token(seed: int) -> None:
    signed = int(np.array([seed], np.uint64).view(np.int64)[0])
    positions = [0, 1, 777, 131071]
    for position in positions:
        noise = gumbel_blocks(
            torch.arange(5), torch.full((5,), position), torch.full((5,), signed)
        ).flatten()
        expected = [naive_gumbel(seed, position, token) for token in range(20)]
        torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_bounds_hold_at_the_extremes_of_u() -> None:
    for word in (0, 0xFFFFFFFF):
        uniform = ((word >> 8) + 0.5) * 2.0**-24
        noise = float(torch.tensor(-math.log(-math.log(uniform))).float())
        assert GUMBEL_MIN < noise < GUMBEL_MAX
