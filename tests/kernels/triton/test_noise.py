"""Noise on the device against the reference's, over all values that it takes."""

import pytest
import torch
import triton
import triton.language as tl

from trunkline.kernels.torch_reference.philox import gumbel_blocks
from trunkline.kernels.triton.noise import (
    ERROR,
    exact_noise,
    near_noise,
    words_in_order,
    words_of_ids,
)

BLOCK = 1 << 18
NUM_VALUES = 1 << 24


@triton.jit
def _noise_kernel(first, exact, near, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    words = ((first + at) << 8).to(tl.uint32)
    tl.store(exact + at, exact_noise(words))
    tl.store(near + at, near_noise(words))


@triton.jit
def _words_kernel(seed, position, in_order, of_ids, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    position = position.to(tl.int32)
    tl.store(in_order + at, exact_noise(words_in_order(64, position, seed, BLOCK // 4)))
    tl.store(of_ids + at, exact_noise(words_of_ids(256 + at, position, seed)))


def check_values(first: int) -> None:
    exact, near = torch.empty(BLOCK), torch.empty(BLOCK)
    _noise_kernel[(1,)](first, exact, near, BLOCK=BLOCK)
    uniform = (torch.arange(first, first + BLOCK).double() + 0.5) * 2.0**-24
    expected = uniform.log().neg().log().neg().float()
    assert torch.equal(exact, expected)
    assert float((near - expected).abs().max()) < ERROR.value / 4


@pytest.mark.parametrize("first", [0, NUM_VALUES // 2 - BLOCK // 2, NUM_VALUES - BLOCK])
def test_ends_and_middle(first: int) -> None:
    check_values(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_VALUES, BLOCK))
def test_every_value(first: int) -> None:
    check_values(first)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 7, 2**31 - 1])
def test_noise_is_that_of_the_reference(seed: int, position: int) -> None:
    in_order, of_ids = torch.empty(128), torch.empty(128)
    _words_kernel[(1,)](seed, position, in_order, of_ids, BLOCK=128)
    blocks = torch.arange(64, 96)
    seeds, positions = torch.full_like(blocks, seed), torch.full_like(blocks, position)
    expected = gumbel_blocks(blocks, positions, seeds).reshape(-1)
    assert torch.equal(in_order, expected)
    assert torch.equal(of_ids, expected)
