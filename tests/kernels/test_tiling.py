"""Row tiling: which heights are found invariant, and how rows are covered."""

from __future__ import annotations

import pytest
import torch

from trunkline.kernels.torch_reference.attention import power_of_two
from trunkline.kernels.torch_reference.tiling import (
    CANDIDATE_HEIGHTS,
    invariant_heights,
    split_rows,
    tiled_product,
)

LIKE = torch.empty(0)


def exact(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def rounds_by_height(x: torch.Tensor) -> torch.Tensor:
    """Heights below 8 round otherwise, as some GEMMs do."""
    return x * 2 if x.shape[0] >= 8 else x * 2.0000002


def rounds_by_position(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[-1:] *= 1.0000001
    return y


def rounds_by_neighbour(x: torch.Tensor) -> torch.Tensor:
    return x + x.sum() * 1e-7


def test_every_height_of_an_exact_product_is_invariant() -> None:
    assert invariant_heights(exact, 5, LIKE) == CANDIDATE_HEIGHTS


def test_heights_that_round_otherwise_are_left_out() -> None:
    assert invariant_heights(rounds_by_height, 5, LIKE) == CANDIDATE_HEIGHTS[3:]


@pytest.mark.parametrize("product", [rounds_by_position, rounds_by_neighbour])
def test_rows_run_alone_where_neighbours_matter(product: object) -> None:
    assert invariant_heights(product, 5, LIKE) == (1,)  # type: ignore[arg-type]


@pytest.mark.parametrize("heights", [(1,), (16,), (4, 16), CANDIDATE_HEIGHTS])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 15, 16, 17, 63, 512, 513, 1100])
def test_rows_are_covered_once(heights: tuple[int, ...], num_rows: int) -> None:
    pieces = split_rows(num_rows, heights)
    assert set(pieces) <= set(heights)
    assert sum(pieces) - num_rows < pieces[-1]
    rows = torch.arange(num_rows * 2.0).view(num_rows, 2)
    assert torch.equal(tiled_product(exact, rows, heights), exact(rows))


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(0.0, -127.0, -1.0)
    expected = torch.ldexp(torch.ones(127, dtype=torch.float64), exponents.int()).float()
    assert torch.equal(power_of_two(exponents), expected)
    assert power_of_two(torch.tensor([-127.0, -1e5])).tolist() == [0.0, 0.0]
