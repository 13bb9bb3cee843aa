"""Where a row's cut lies, roughly: histograms of keys in two rounds, then a list of what is left.

A round counts the keys (see `threshold`) of a row by *levels*, over all its tiles at once, and one
program per row then narrows the *bracket* of keys that the cut must lie in. Top-k follows from the
counts exactly. Top-p is bracketed by what masses the counts allow, from the edges of the levels.
Levels are 1/16 of a power of two wide in the first round and 1/255 of the bracket in the second;
what is below the bracket is counted and weighed exactly meanwhile. The few candidates that are left
inside are listed, in any order: nothing that follows depends on it.

Where both top-k and top-p cut, the bracket begins at the best id: the mass of all that top-k keeps
is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.rows import MINUS_INFINITY, row_of_sample, scale
from trunkline.kernels.triton.threshold import (
    LARGEST_KEY,
    NO_KEY,
    as_number,
    keys_of,
    masses_of,
)
from trunkline.plan import TOP_K as TOP_K_COLUMN
from trunkline.plan import TOP_P as TOP_P_COLUMN

CAPACITY = 8192  # candidates that are listed; with more the row is read again
NUM_LEVELS = 256
# First round: levels are the key's upper bits, from 2^-10 to 2^6. The last one counts what is
# farther, or no candidate at all: none of it can be drawn, and all of it has no mass.
FIRST_SHIFT = tl.constexpr(19)
FIRST_LEVEL = tl.constexpr((127 - 10) << 4)
FEW = tl.constexpr(CAPACITY // 2)  # candidates that need no second round
SAFETY = tl.constexpr(1e-12)  # of the whole mass, for the rounding of its bounds

TOP_P = tl.constexpr(TOP_P_COLUMN)
TOP_K = tl.constexpr(TOP_K_COLUMN)

# What is left to do for a sample.
NOTHING = tl.constexpr(0)
DRAW = tl.constexpr(1)
CUT = tl.constexpr(2)  # and then draw

# Columns of `sums`: two words of mass each, and the number, of what is below the bracket.
SUMS = 8
WHOLE = tl.constexpr(0)
ROUND = tl.constexpr(2)
LISTED = tl.constexpr(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Brackets:
    """What is known of the cuts of S samples."""

    low: torch.Tensor  # [S] int32, least key of the bracket
    high: torch.Tensor  # [S] int32, largest
    shift: torch.Tensor  # [S] int32, of the second round's levels; -1: there is none
    levels: torch.Tensor  # [2, S, NUM_LEVELS] int32
    sums: torch.Tensor  # [S, SUMS] int64
    count: torch.Tensor  # [S] int32, candidates in the bracket
    listed_scaled: torch.Tensor  # [S, capacity] float32
    listed_ids: torch.Tensor  # [S, capacity] int32


def new_brackets(num_samples: int, logits: torch.Tensor) -> Brackets:
    """Allocate, with brackets that hold everything."""
    capacity = min(CAPACITY, logits.shape[1])

    def integers(*shape: int) -> torch.Tensor:
        return logits.new_empty(shape, dtype=torch.int32)

    return Brackets(
        low=logits.new_zeros(num_samples, dtype=torch.int32),
        high=logits.new_full((num_samples,), LARGEST_KEY.value, dtype=torch.int32),
        shift=integers(num_samples),
        levels=logits.new_zeros((2, num_samples, NUM_LEVELS), dtype=torch.int32),
        sums=logits.new_zeros((num_samples, SUMS), dtype=torch.int64),
        count=logits.new_zeros(num_samples, dtype=torch.int32),
        listed_scaled=logits.new_empty((num_samples, capacity)),
        listed_ids=integers(num_samples, capacity),
    )


@triton.jit
def limits_of(ints, floats, slot, ints_stride, floats_stride, vocabulary):
    """Number of ids that top-k keeps, and top-p as float64."""
    top_k = tl.load(ints + slot * ints_stride + TOP_K)
    top_p = tl.load(floats + slot * floats_stride + TOP_P).to(tl.float64)
    return tl.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k), top_p


@triton.jit
def survey_kernel(
    logits,
    adjusted,
    is_adjusted,
    maxima,
    adjusted_maxima,
    logit_index,
    sample_slot,
    ints,
    floats,
    best_logit,
    temperatures,
    kinds,
    bounds,
    lows,
    highs,
    shifts,
    levels,
    sums,
    counts,
    listed_scaled,
    listed_ids,
    logits_stride,
    ints_stride,
    floats_stride,
    vocabulary,
    capacity,
    num_groups,
    STAGE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
    SUMS: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    """One tile: stages 1 and 2 count levels, stage 3 lists candidates."""
    sample = tl.program_id(0)
    tile = tl.program_id(1)
    if tl.load(kinds + sample) != CUT:
        return
    if STAGE == 2:
        if tl.load(shifts + sample) < 0:
            return
    best = tl.load(best_logit + sample)
    temperature = tl.load(temperatures + sample)
    of_row = row_of_sample(
        maxima, num_groups, logit_index, adjusted_maxima, is_adjusted, sample, num_groups, ADJUSTS
    )
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    highest = scale(tl.max(tl.load(of_row + groups), 0), best, temperature)
    bound = tl.load(bounds + sample)
    low = tl.load(lows + sample)
    high = tl.load(highs + sample)
    if (highest < bound) | (keys_of(highest) > high):
        return
    row = row_of_sample(
        logits, logits_stride, logit_index, adjusted, is_adjusted, sample, vocabulary, ADJUSTS
    )
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(row + ids, mask=ids < vocabulary, other=MINUS_INFINITY)
    scaled = scale(x, best, temperature)
    scaled = tl.where(scaled >= bound, scaled, MINUS_INFINITY)
    keys = keys_of(scaled)
    sums += sample.to(tl.int64) * SUMS
    if STAGE == 1:
        slot = tl.load(sample_slot + sample)
        limit, _ = limits_of(ints, floats, slot, ints_stride, floats_stride, vocabulary)
        if limit == vocabulary:
            mass_high, mass_low = masses_of(keys)
            tl.atomic_add(sums + WHOLE, tl.sum(mass_high, 0))
            tl.atomic_add(sums + WHOLE + 1, tl.sum(mass_low, 0))
        level = tl.maximum((keys >> FIRST_SHIFT) - FIRST_LEVEL, 0)
    else:
        if low > 0:
            below = keys < low
            base = sums + (ROUND if STAGE == 2 else LISTED)
            mass_high, mass_low = masses_of(tl.where(below, keys, NO_KEY))
            tl.atomic_add(base, tl.sum(mass_high, 0))
            tl.atomic_add(base + 1, tl.sum(mass_low, 0))
            tl.atomic_add(base + 2, tl.sum(below.to(tl.int64), 0))
        level = (keys - low) >> tl.maximum(tl.load(shifts + sample), 0)
    inside = (keys >= low) & (keys <= high)
    if STAGE < 3:
        level = tl.where(inside, tl.minimum(level, NUM_LEVELS - 1), NUM_LEVELS - 1)
        cells = levels + sample.to(tl.int64) * NUM_LEVELS + tl.arange(0, NUM_LEVELS)
        found = tl.histogram(level, NUM_LEVELS)
        tl.atomic_add(cells, found, mask=found > 0)
    else:
        flags = inside.to(tl.int32)
        first = tl.atomic_add(counts + sample, tl.sum(flags, 0))
        at = first + tl.cumsum(flags, 0) - 1
        target = sample.to(tl.int64) * capacity + at
        is_listed = inside & (at < capacity)
        tl.store(listed_scaled + target, scaled, mask=is_listed)
        tl.store(listed_ids + target, ids, mask=is_listed)


@triton.jit
def narrow_kernel(
    sample_slot,
    ints,
    floats,
    kinds,
    floors,
    lows,
    highs,
    shifts,
    levels,
    sums,
    ints_stride,
    floats_stride,
    vocabulary,
    STAGE: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """One row: the bracket from the counts of stage 1 or 2."""
    sample = tl.program_id(0)
    if tl.load(kinds + sample) != CUT:
        return
    shift = tl.full((), 0, tl.int32) + FIRST_SHIFT
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32) + LARGEST_KEY
    first = tl.full((), 0, tl.int32) + FIRST_LEVEL
    if STAGE == 2:
        shift = tl.load(shifts + sample)
        low = tl.load(lows + sample)
        high = tl.load(highs + sample)
        first = first * 0
    if shift < 0:
        return
    slot = tl.load(sample_slot + sample)
    limit, top_p = limits_of(ints, floats, slot, ints_stride, floats_stride, vocabulary)
    sums += sample.to(tl.int64) * SUMS
    numbers = tl.arange(0, NUM_LEVELS)
    count = tl.load(levels + sample.to(tl.int64) * NUM_LEVELS + numbers)
    count = tl.where(numbers < NUM_LEVELS - 1, count, 0)
    begin, end = _edges(numbers, first, shift, low, high, STAGE)
    num_short, last = _find_levels(
        count, begin, end, limit, top_p, sums, vocabulary, STAGE, NUM_LEVELS
    )
    new_low, _ = _edges(num_short, first, shift, low, high, STAGE)
    _, new_high = _edges(last, first, shift, low, high, STAGE)
    if (limit < vocabulary) & (top_p < 1.0):
        new_low = tl.full((), 0, tl.int32)
    has_none = last == NUM_LEVELS - 1
    new_high = tl.where(has_none, high, new_high)
    # Top-k may keep more than there are candidates, or all that may be drawn may be kept.
    if (has_none & (top_p == 1.0)) | (new_low > keys_of(tl.load(floors + sample))):
        tl.store(kinds + sample, DRAW)
    tl.store(lows + sample, new_low)
    tl.store(highs + sample, new_high)
    if STAGE == 1:
        in_bracket = (end > new_low) & (begin <= new_high)
        is_small = tl.sum(tl.where(in_bracket, count, 0), 0) <= FEW
        next_shift = tl.full((), 0, tl.int32)
        while ((new_high - new_low) >> next_shift) > NUM_LEVELS - 2:
            next_shift += 1
        tl.store(shifts + sample, tl.where(is_small, -1, next_shift))


@triton.jit
def _find_levels(
    count, begin, end, limit, top_p, sums, vocabulary, STAGE: tl.constexpr, NUM_LEVELS: tl.constexpr
):
    """First and last level that the cut may lie in; the last of all stands for none."""
    if limit < vocabulary:
        reached = tl.cumsum(count, 0) + tl.load(sums + ROUND + 2).to(tl.int32) >= limit
        is_short = reached == 0
    else:
        whole = as_number(tl.load(sums + WHOLE), tl.load(sums + WHOLE + 1))
        base = as_number(tl.load(sums + ROUND), tl.load(sums + ROUND + 1))
        target = top_p * whole
        # All in a level weigh at most what its near edge does, and at least what the far one does.
        near = count.to(tl.float64) * _mass(begin)
        far = count.to(tl.float64) * _mass(end)
        most = base + tl.cumsum(near, 0)
        least = base + tl.cumsum(far, 0)
        if STAGE == 1:
            # The whole without what comes after.
            most = tl.minimum(most, whole - tl.sum(far, 0) + tl.cumsum(far, 0))
            least = tl.maximum(least, whole - tl.sum(near, 0) + tl.cumsum(near, 0))
        reached = least - SAFETY * whole >= target
        is_short = most + SAFETY * whole < target
    num_reached = tl.sum(reached.to(tl.int32), 0)
    last = tl.minimum(NUM_LEVELS - num_reached, NUM_LEVELS - 1)
    return tl.minimum(tl.sum(is_short.to(tl.int32), 0), last), last


@triton.jit
def _edges(number, first, shift, low, high, STAGE: tl.constexpr):
    """Least and largest key of a level."""
    if STAGE == 1:
        begin = tl.where(number == 0, 0, (number + first) << shift)
        end = ((number + first + 1) << shift) - 1
    else:
        begin = tl.minimum(low + (number << shift), high)
        end = tl.minimum(low + ((number + 1) << shift) - 1, high)
    return begin, end


@triton.jit
def _mass(keys):
    return tl.exp(-keys.to(tl.float32, bitcast=True).to(tl.float64))
