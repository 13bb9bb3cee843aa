"""Rows of logits, in tiles: whose they are, and their largest values by group.

A sample draws from its row of the logits, or from an adjusted copy of it (`penalties`). Every other
pass over the vocabulary first looks at the maxima of groups of `GROUP` ids, and leaves out the
tiles that cannot matter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.launch import ceil_div

TILE = 2048  # ids of one program
GROUP = 512  # ids of one maximum
GROUPS_PER_TILE = TILE // GROUP
NUM_WARPS = 4
MINUS_INFINITY = tl.constexpr(-math.inf)
INFINITY = tl.constexpr(math.inf)
NAN = tl.constexpr(math.nan)


def num_tiles(vocabulary: int) -> int:
    """Tiles of a row."""
    return ceil_div(vocabulary, TILE)


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """The largest value of every group, NaN where one of the group is not finite.

    Args:
        logits: [L, V] float32, rows contiguous.

    Returns:
        [L, tiles * GROUPS_PER_TILE] float32; -inf for groups beyond the vocabulary.
    """
    rows, vocabulary = logits.shape
    tiles = num_tiles(vocabulary)
    maxima = logits.new_empty((rows, tiles * GROUPS_PER_TILE))
    if rows > 0:
        _group_maxima_kernel[(rows, tiles)](
            logits,
            None,
            maxima,
            logits.stride(0),
            vocabulary,
            maxima.shape[1],
            TILE=TILE,
            GROUP=GROUP,
            CHECK_FINITE=True,
            num_warps=NUM_WARPS,
        )
    return maxima


def update_group_maxima(rows: torch.Tensor, wanted: torch.Tensor, maxima: torch.Tensor) -> None:
    """Write the largest value of every group of some rows; -inf is a value like others.

    Args:
        rows: [S, V] float32, contiguous.
        wanted: [S] int32, not 0 for the rows that are looked at.
        maxima: [S, tiles * GROUPS_PER_TILE] float32.
    """
    _group_maxima_kernel[(rows.shape[0], num_tiles(rows.shape[1]))](
        rows,
        wanted,
        maxima,
        rows.stride(0),
        rows.shape[1],
        maxima.shape[1],
        TILE=TILE,
        GROUP=GROUP,
        CHECK_FINITE=False,
        num_warps=NUM_WARPS,
    )


@triton.jit
def maxima_of_tile(values, TILE: tl.constexpr, GROUP: tl.constexpr):
    """[TILE] to [TILE / GROUP]."""
    return tl.max(tl.reshape(values, (TILE // GROUP, GROUP)), axis=1)


@triton.jit
def _group_maxima_kernel(
    values,
    wanted,
    maxima,
    stride,
    vocabulary,
    num_groups,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CHECK_FINITE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if wanted is not None:
        if tl.load(wanted + row) == 0:
            return
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(values + row * stride + ids, mask=ids < vocabulary, other=MINUS_INFINITY)
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    if CHECK_FINITE:
        is_bad = ((x != x) | (tl.abs(x) == INFINITY)) & (ids < vocabulary)
        best = maxima_of_tile(tl.where(is_bad, MINUS_INFINITY, x), TILE, GROUP)
        num_bad = maxima_of_tile(is_bad.to(tl.int32), TILE, GROUP)
        best = tl.where(num_bad > 0, NAN, best)
    else:
        best = maxima_of_tile(x, TILE, GROUP)
    tl.store(maxima + row * num_groups + groups, best)


@triton.jit
def row_of_sample(
    logits, stride, logit_index, adjusted, is_adjusted, sample, width, ADJUSTS: tl.constexpr
):
    """Pointer to the row of `width` elements that a sample draws from.

    Also of the maxima of such rows: `logits` is what there is per logit position, `adjusted` what
    there is per sample.
    """
    row = logits + tl.load(logit_index + sample).to(tl.int64) * stride
    if ADJUSTS:
        if tl.load(is_adjusted + sample) != 0:
            row = adjusted + sample.to(tl.int64) * width
    return row


@triton.jit
def scale(x, best, temperature):
    """`(x - best) / temperature`, rounded as IEEE 754 says."""
    return tl.div_rn(x - best, temperature)
