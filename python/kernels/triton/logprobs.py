"""Log-probs of a step: normalisers, of given ids, and the best ids of a row.

They are log-softmax in float32 of the raw logits, or, at the logit position of a *processed*
sample, of its adjusted logits less their best, divided by the temperature. A row is summed by tiles
of fixed width, those in a fixed tree: the same bits for a row in any step.

The best ids of a row are found by comparing 64-bit keys: the logit's bits, made to ascend with it,
above the complement of the id. A tile can hold one of the n best only if fewer than n tiles have a
larger maximum; the others are not searched. The lists of those that are, each in order, are merged.
How many are asked for is no constant of a kernel: any number is served by the same binary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.draw import Draws
from trunkline.kernels.triton.launch import next_power_of_2
from trunkline.kernels.triton.rows import (
    GROUP,
    MINUS_INFINITY,
    NUM_WARPS,
    TILE,
    num_tiles,
    row_of_sample,
    scale,
)

MAX_TOP_N = 128
LEAST_KEY = tl.constexpr(-(2**63))
ID_BITS = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbRequest:
    """What is wanted of L logit positions."""

    is_wanted: torch.Tensor  # [L] int32, not 0 where anything is wanted, of its samples too
    top_n: torch.Tensor | None  # [L] int32, at most `max_top_n` each
    max_top_n: int = 0
    score_rows: torch.Tensor | None = None  # [N] int32 logit position; -1: nothing
    score_ids: torch.Tensor | None = None  # [N] int32
    # [L] int32: the processed sample that draws there, -1: none. None: there are none.
    processed_sample: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """Entries that were not wanted mean nothing; those of failed rows neither, and are no NaN."""

    sampled: torch.Tensor  # [S] float32, of every sample's token
    scored: torch.Tensor | None  # [N] float32
    top_ids: torch.Tensor | None  # [L, max_top_n] int32, best first, lower id first among equals
    top_values: torch.Tensor | None  # [L, max_top_n] float32


def log_probs(draws: Draws, logit_index: torch.Tensor, request: LogProbRequest) -> LogProbs:
    """Compute what is wanted.

    Args:
        draws: of `draw`.
        logit_index: [S] int32, as there.
        request: what is wanted; ids must lie in the vocabulary.

    Raises:
        ValueError: `max_top_n` is above `MAX_TOP_N`, or above the vocabulary.
    """
    logits = draws.rows.logits
    num_rows, vocabulary = logits.shape
    if request.max_top_n > min(MAX_TOP_N, vocabulary):
        raise ValueError(
            f"max_top_n is {request.max_top_n}, the limit is {min(MAX_TOP_N, vocabulary)}"
        )
    width = request.max_top_n if request.top_n is not None else 0
    normalisers = logits.new_zeros(num_rows)
    top_ids = logits.new_zeros((num_rows, width), dtype=torch.int32) if width else None
    top_values = logits.new_zeros((num_rows, width)) if width else None
    if num_rows > 0:
        _launch_rows(draws, logit_index, request, normalisers, (top_ids, top_values))
    sampled = _at(draws, logit_index, request, normalisers, (logit_index, draws.token_ids))
    scored = None
    if request.score_rows is not None and request.score_ids is not None:
        entries = (request.score_rows, request.score_ids)
        scored = _at(draws, logit_index, request, normalisers, entries)
    return LogProbs(sampled=sampled, scored=scored, top_ids=top_ids, top_values=top_values)


def _launch_rows(
    draws: Draws,
    logit_index: torch.Tensor,
    request: LogProbRequest,
    normalisers: torch.Tensor,
    top: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    rows, logits = draws.rows, draws.rows.logits
    num_rows, vocabulary = logits.shape
    tiles = num_tiles(vocabulary)
    width = 0 if top[0] is None else top[0].shape[1]
    ranks = min(width, tiles)
    largest = logits.new_empty((num_rows, tiles))
    sums = logits.new_empty((num_rows, tiles))
    keys = logits.new_empty((num_rows, ranks, width), dtype=torch.int64) if width else None
    _sums_and_best_kernel[(num_rows, tiles)](
        *_sources(draws, logit_index, request),
        rows.maxima,
        rows.adjusted_maxima,
        request.is_wanted,
        request.top_n if width else None,
        largest,
        sums,
        keys,
        vocabulary,
        logits.stride(0),
        rows.maxima.shape[1],
        ranks,
        width,
        TILE=TILE,
        GROUPS_PER_TILE=TILE // GROUP,
        TILES=next_power_of_2(tiles),
        ADJUSTS=rows.adjusted is not None,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    _normalise_kernel[(num_rows,)](
        request.is_wanted,
        request.top_n if width else None,
        largest,
        sums,
        keys,
        normalisers,
        *top,
        tiles,
        ranks,
        width,
        TILES=next_power_of_2(tiles),
        num_warps=NUM_WARPS,
    )


def _at(
    draws: Draws,
    logit_index: torch.Tensor,
    request: LogProbRequest,
    normalisers: torch.Tensor,
    entries: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    rows, logits = draws.rows, draws.rows.logits
    num_entries = entries[0].shape[0]
    out = logits.new_zeros(num_entries)
    if num_entries > 0:
        _log_probs_at_kernel[(num_entries,)](
            *_sources(draws, logit_index, request),
            request.is_wanted,
            normalisers,
            *entries,
            out,
            logits.shape[1],
            logits.stride(0),
            ADJUSTS=rows.adjusted is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


def _sources(
    draws: Draws, logit_index: torch.Tensor, request: LogProbRequest
) -> tuple[torch.Tensor | None, ...]:
    rows = draws.rows
    return (
        rows.logits,
        rows.adjusted,
        rows.is_adjusted,
        logit_index,
        rows.best,
        rows.temperature,
        draws.sample_possible,
        draws.logit_finite,
        request.processed_sample,
    )


@triton.jit
def _row(
    logits, stride, logit_index, adjusted, is_adjusted, best, temperatures, possible, processed,
    row, width, ADJUSTS: tl.constexpr,
):  # fmt: skip
    """Where a row's elements come from, what is taken from them and what they are divided by.

    Of `width` elements per row: logits or group maxima.
    """
    source = logits + row * stride
    shift = tl.full((), 0.0, tl.float32)
    divisor = tl.full((), 1.0, tl.float32)
    if processed is not None:
        sample = tl.load(processed + row)
        if sample >= 0:
            if tl.load(possible + sample) != 0:
                source = row_of_sample(
                    logits, stride, logit_index, adjusted, is_adjusted, sample, width, ADJUSTS
                )
                shift = tl.load(best + sample)
                divisor = tl.load(temperatures + sample)
    return source, shift, divisor


@triton.jit
def _keys(values, ids):
    """Descending: the larger value, and the lower id among equals."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & ID_BITS)
    return (ordered.to(tl.int64) << 32) | (-ids + ID_BITS).to(tl.int64)


@triton.jit(do_not_specialize=["num_ranks", "width"])
def _sums_and_best_kernel(
    logits,
    adjusted,
    is_adjusted,
    logit_index,
    best,
    temperatures,
    possible,
    logit_finite,
    processed,
    maxima,
    adjusted_maxima,
    is_wanted,
    top_n,
    largest,
    sums,
    keys,
    vocabulary,
    stride,
    num_groups,
    num_ranks,
    width,
    TILE: tl.constexpr,
    GROUPS_PER_TILE: tl.constexpr,
    TILES: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    if tl.load(is_wanted + row) == 0:
        return
    is_finite = tl.load(logit_finite + row) != 0
    source, shift, divisor = _row(
        logits, stride, logit_index, adjusted, is_adjusted, best, temperatures, possible, processed,
        row, vocabulary, ADJUSTS,
    )  # fmt: skip
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocabulary
    x = tl.load(source + ids, mask=inside, other=MINUS_INFINITY)
    x = tl.where(is_finite, scale(x, shift, divisor), tl.where(inside, 0.0, MINUS_INFINITY))
    top = tl.max(x, 0)
    reference = tl.where(top > MINUS_INFINITY, top, 0.0)
    tl.store(largest + row * num_tiles + tile, top)
    tl.store(sums + row * num_tiles + tile, tl.sum(tl.exp(x - reference), 0))
    if top_n is not None:
        wanted = tl.load(top_n + row)
        if wanted > 0:
            of_row, shift, divisor = _row(
                maxima, num_groups, logit_index, adjusted_maxima, is_adjusted, best, temperatures,
                possible, processed, row, num_groups, ADJUSTS,
            )  # fmt: skip
            tiles = tl.arange(0, TILES)
            groups = tiles[:, None] * GROUPS_PER_TILE + tl.arange(0, GROUPS_PER_TILE)[None, :]
            best_of_group = tl.load(of_row + groups, mask=groups < num_groups, other=MINUS_INFINITY)
            best_of_tile = scale(tl.max(best_of_group, 1), shift, divisor)
            best_of_tile = tl.where(is_finite, best_of_tile, 0.0)
            before = (best_of_tile > top) | ((best_of_tile == top) & (tiles < tile))
            rank = tl.sum((before & (tiles < num_tiles)).to(tl.int32), 0)
            if rank < wanted:
                left = tl.where(inside, _keys(x, ids), LEAST_KEY)
                for place in range(0, wanted):
                    largest_key = tl.max(left, 0)
                    tl.store(keys + (row * num_ranks + rank) * width + place, largest_key)
                    left = tl.where(left == largest_key, LEAST_KEY, left)


@triton.jit(do_not_specialize=["num_ranks", "width"])
def _normalise_kernel(
    is_wanted,
    top_n,
    largest,
    sums,
    keys,
    normalisers,
    top_ids,
    top_values,
    num_tiles,
    num_ranks,
    width,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_wanted + row) == 0:
        return
    tiles = tl.arange(0, TILES)
    at = row * num_tiles + tiles
    tops = tl.load(largest + at, mask=tiles < num_tiles, other=MINUS_INFINITY)
    parts = tl.load(sums + at, mask=tiles < num_tiles, other=0.0)
    top = tl.max(tops, 0)
    normaliser = top + tl.log(tl.sum(parts * tl.exp(tops - top), 0))
    tl.store(normalisers + row, normaliser)
    if top_n is not None:
        wanted = tl.load(top_n + row)
        # By rank of a tile: its list, and how many of it are taken.
        lists = keys + (row * num_ranks + tiles) * width
        taken = tl.zeros([TILES], tl.int32)
        for place in range(0, wanted):
            has_more = (tiles < tl.minimum(wanted, num_ranks)) & (taken < wanted)
            heads = tl.load(lists + taken, mask=has_more, other=LEAST_KEY)
            key = tl.max(heads, 0)
            taken += (heads == key).to(tl.int32)
            ordered = (key >> 32).to(tl.int32)
            value = (ordered ^ ((ordered >> 31) & ID_BITS)).to(tl.float32, bitcast=True)
            tl.store(top_ids + row * width + place, -(key & ID_BITS).to(tl.int32) + ID_BITS)
            tl.store(top_values + row * width + place, value - normaliser)


@triton.jit
def _log_probs_at_kernel(
    logits,
    adjusted,
    is_adjusted,
    logit_index,
    best,
    temperatures,
    possible,
    logit_finite,
    processed,
    is_wanted,
    normalisers,
    entry_rows,
    entry_ids,
    out,
    vocabulary,
    stride,
    ADJUSTS: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(entry_rows + entry).to(tl.int64)
    if row < 0:
        return
    if tl.load(is_wanted + row) == 0:
        return
    source, shift, divisor = _row(
        logits, stride, logit_index, adjusted, is_adjusted, best, temperatures, possible, processed,
        row, vocabulary, ADJUSTS,
    )  # fmt: skip
    x = scale(tl.load(source + tl.load(entry_ids + entry)), shift, divisor)
    x = tl.where(tl.load(logit_finite + row) != 0, x, 0.0)
    tl.store(out + entry, x - tl.load(normalisers + row))
