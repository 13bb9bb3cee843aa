"""Row counts at which a matrix product gives every row the same bits.

A GEMM may sum a row in another order when the number of rows changes. So products run only at row
counts ("heights") that were proven on this machine, for this shape, to give each row the bits that
it has in a zero-padded tile of `REFERENCE_HEIGHT` rows. Reduction order does not depend on the
data, so agreement on random data is agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

REFERENCE_HEIGHT = 16
CANDIDATE_HEIGHTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out]


def random_tensor(shape: tuple[int, ...], like: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal random numbers on the device and in the dtype of `like`, without global state."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like)


def _reference_is_invariant(product: Product, rows: torch.Tensor) -> bool:
    together = product(rows)
    for index in range(REFERENCE_HEIGHT):
        alone = torch.zeros_like(rows)
        position = (index * 7 + 3) % REFERENCE_HEIGHT
        alone[position] = rows[index]
        if not torch.equal(product(alone)[position], together[index]):
            return False
    return True


def invariant_heights(
    product: Product, width: int, like: torch.Tensor, tallest: int = CANDIDATE_HEIGHTS[-1]
) -> tuple[int, ...]:
    """Heights at which `product` may run, ascending.

    Args:
        product: the matrix product.
        width: elements of an input row.
        like: a tensor of the input's device and dtype.
        tallest: the highest candidate to try, at least `REFERENCE_HEIGHT`.

    Returns:
        At least one height; `(1,)`, each row by itself, if nothing else is invariant.
    """
    rows = random_tensor((tallest, width), like, seed=1)
    if not _reference_is_invariant(product, rows[:REFERENCE_HEIGHT].clone()):
        return (1,)
    expected = torch.cat([product(tile.clone()) for tile in torch.split(rows, REFERENCE_HEIGHT)])
    return tuple(
        height
        for height in CANDIDATE_HEIGHTS
        if height <= tallest
        and (
            height == REFERENCE_HEIGHT
            or torch.equal(product(rows[:height].clone()), expected[:height])
        )
    )


@lru_cache(maxsize=4096)
def split_rows(num_rows: int, heights: tuple[int, ...]) -> tuple[int, ...]:
    """Cover `num_rows` by heights: the largest as often as it fits, then one that is enough."""
    full, rest = divmod(num_rows, heights[-1])
    pieces = (heights[-1],) * full
    return pieces if rest == 0 else (*pieces, next(h for h in heights if h >= rest))


def tiled_product(product: Product, x: torch.Tensor, heights: tuple[int, ...]) -> torch.Tensor:
    """`product(x)`, computed at the given heights, padded with zero rows.

    Args:
        product: the matrix product.
        x: [rows, in], contiguous.
        heights: of `invariant_heights`.
    """
    num_rows = x.shape[0]
    pieces = split_rows(num_rows, heights)
    if sum(pieces) != num_rows:
        padded = x.new_zeros((sum(pieces), x.shape[1]))
        padded[:num_rows] = x
        x = padded
    if len(pieces) == 1:
        return product(x)[:num_rows]
    return torch.cat([product(tile) for tile in torch.split(x, list(pieces))])[:num_rows]
