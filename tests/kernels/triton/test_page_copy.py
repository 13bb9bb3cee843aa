"""Page moves."""

import pytest
import torch
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.page_copy import copy_pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
@pytest.mark.parametrize("heads", [(1, 24), (3, 200)])
def test_leading_tokens_are_copied_in_every_plane(
    guards: Guards, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    pools = guards.full(torch.randn(2, 2, 7, 16, *heads).to(dtype))
    expected = pools.float()
    moves = [(1, 4, 16), (2, 5, 3), (0, 0, 0), (6, 3, 1)]
    for source, destination, tokens in moves:
        expected[:, :, destination, :tokens] = expected[:, :, source, :tokens]
    copy_pages(pools, guards.full(torch.tensor(moves, dtype=torch.int32)))
    assert torch.equal(pools.float(), expected)


def test_no_moves(guards: Guards) -> None:
    pools = guards.full(torch.ones(1, 2, 16, 1, 8))
    copy_pages(pools, torch.zeros(0, 3, dtype=torch.int32))
    assert bool((pools == 1).all())


def test_pools_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        copy_pages(torch.zeros(2, 16, 1, 8)[:, ::2], torch.zeros(1, 3, dtype=torch.int32))
