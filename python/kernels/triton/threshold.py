"""Which of a row's ids top-k and top-p keep, without sorting: bisection over float bits.

A scaled logit is at most 0, so the bits of its distance from 0 ascend with it; they are the *key*.
Kept are all ids with a key below a limit, and of those that have the limit itself the lowest ids:
that is what a stable sort keeps.

Masses are summed as integers in units of 2^-80, in two words of 40 bits, so that no order of
summing (over programs, atomics, candidates in any order) changes a bit. They differ from the
reference's float64 sums by less than those do from the truth. The sets are therefore equal unless a
partial sum equals its target up to float64's rounding, which distinct masses cannot do exactly
(powers of e are linearly independent) and equal ones are computed without error here and there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trunkline.kernels.triton.rows import MINUS_INFINITY, scale

LARGEST_KEY = tl.constexpr(0x7F800000 - 1)
NO_KEY = tl.constexpr(0x7F800000)  # of -inf: an id that is no candidate; its mass is 0
HIGH_UNITS = tl.constexpr(2.0**40)
PER_HIGH_UNIT = tl.constexpr(2.0**-40)
UNIT = tl.constexpr(2.0**-80)
MASSLESS = tl.constexpr(-56.0)  # exp of less is below 2^-80


@triton.jit
def masses_of(keys):
    """Mass of every key, as high and low int64 words."""
    mass = tl.exp(-keys.to(tl.float32, bitcast=True).to(tl.float64)) * HIGH_UNITS
    high = mass.to(tl.int64)
    low = ((mass - high.to(tl.float64)) * HIGH_UNITS).to(tl.int64)
    return high, low


@triton.jit
def as_number(high, low):
    """A sum of masses as float64."""
    return (high.to(tl.float64) + low.to(tl.float64) * PER_HIGH_UNIT) * PER_HIGH_UNIT


@triton.jit
def keys_of(scaled):
    """Keys of scaled logits; -0 has that of 0."""
    distance = tl.where(scaled == 0.0, 0.0, -scaled)
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def load_candidates(source, start, CHUNK: tl.constexpr):
    """A chunk of a row's candidates: from its list, or from the row itself if they are too many.

    Args:
        source: (scaled logits of the list, its ids, the row, number of entries or the row's width,
            whether it is the list, the row's best logit, temperature, least and largest key of a
            candidate); what all functions here take.
        start: of the chunk.
        CHUNK: its length.

    Returns:
        Keys and ids; the key is `NO_KEY` where there is no candidate.
    """
    listed_scaled, listed_ids, row, count, is_listed, best, temperature, low, high = source
    at = start + tl.arange(0, CHUNK)
    inside = at < count
    if is_listed:
        keys = keys_of(tl.load(listed_scaled + at, mask=inside, other=MINUS_INFINITY))
        ids = tl.load(listed_ids + at, mask=inside, other=0)
    else:
        x = tl.load(row + at, mask=inside, other=MINUS_INFINITY)
        keys = keys_of(scale(x, best, temperature))
        keys = tl.where((keys >= low) & (keys <= high), keys, NO_KEY)
        ids = at
    return keys, ids


@triton.jit
def weigh_below(source, limit, CHUNK: tl.constexpr):
    """Number and mass of the candidates with a key below `limit`, and the number of those at it.

    Returns:
        Number, high and low word of the mass, number at `limit`.
    """
    number = tl.zeros((CHUNK,), tl.int32)
    high = tl.zeros((CHUNK,), tl.int64)
    low = tl.zeros((CHUNK,), tl.int64)
    equal = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, source[3], CHUNK):
        keys, _ = load_candidates(source, start, CHUNK)
        below = keys < limit
        more_high, more_low = masses_of(keys)
        number += below.to(tl.int32)
        high += tl.where(below, more_high, 0)
        low += tl.where(below, more_low, 0)
        equal += (keys == limit).to(tl.int32)
    return tl.sum(number, 0), tl.sum(high, 0), tl.sum(low, 0), tl.sum(equal, 0)


@triton.jit
def least_key(
    source, base_high, base_low, target, upper, BY_MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """The least key up to which candidates reach `target`, in number or mass.

    Each step halves the interval and then shrinks it to keys that there are, so it ends after
    about as many steps as the number of different keys has bits.

    Args:
        source: see `load_candidates`.
        base_high: what comes before all candidates: high word of its mass, or its number.
        base_low: low word of its mass.
        target: float64, above 0.
        upper: a key up to which they reach it.
        BY_MASS: whether masses are summed, not candidates counted.
        CHUNK: candidates at once.
    """
    last_short = tl.full((), -1, tl.int32) + source[7]
    first_enough = tl.full((), 0, tl.int32) + upper
    while last_short + 1 < first_enough:
        middle = last_short + (first_enough - last_short) // 2
        high = tl.zeros((CHUNK,), tl.int64)
        low = tl.zeros((CHUNK,), tl.int64)
        largest_inside = tl.full((CHUNK,), -1, tl.int32)
        least_beyond = tl.full((CHUNK,), NO_KEY, tl.int32)
        for start in range(0, source[3], CHUNK):
            keys, _ = load_candidates(source, start, CHUNK)
            inside = keys <= middle
            if BY_MASS:
                more_high, more_low = masses_of(keys)
                high += tl.where(inside, more_high, 0)
                low += tl.where(inside, more_low, 0)
            else:
                high += inside.to(tl.int64)
            largest_inside = tl.maximum(largest_inside, tl.where(inside, keys, -1))
            least_beyond = tl.minimum(least_beyond, tl.where(inside, NO_KEY, keys))
        if BY_MASS:
            reached = as_number(base_high + tl.sum(high, 0), base_low + tl.sum(low, 0))
        else:
            reached = (base_high + tl.sum(high, 0)).to(tl.float64)
        if reached >= target:
            first_enough = tl.max(largest_inside, 0)
        else:
            last_short = tl.minimum(tl.min(least_beyond, 0), first_enough) - 1
    return first_enough


@triton.jit
def id_at_rank(source, key, rank, vocabulary, CHUNK: tl.constexpr):
    """The id that comes at a rank, counted from 1, among the candidates with a key."""
    last_short = tl.full((), -1, tl.int32)
    first_enough = tl.full((), -1, tl.int32) + vocabulary
    while last_short + 1 < first_enough:
        middle = last_short + (first_enough - last_short) // 2
        number = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, source[3], CHUNK):
            keys, ids = load_candidates(source, start, CHUNK)
            number += ((keys == key) & (ids <= middle)).to(tl.int32)
        if tl.sum(number, 0) >= rank:
            first_enough = middle
        else:
            last_short = middle
    return first_enough


@triton.jit
def cut(source, base, limit, top_p, whole, vocabulary, CHUNK: tl.constexpr):
    """What top-k and top-p leave: everything up to (last key, last id), that included.

    Args:
        source: see `load_candidates`; the cut lies among the candidates.
        base: what comes before all of them: two words of mass, and the number; int64.
        limit: top-k, at most the vocabulary. If `top_p` cuts, too, nothing comes before.
        top_p: float64.
        whole: mass of the whole row; is read where only `top_p` cuts.
        vocabulary: width of the row.
        CHUNK: candidates at once.
    """
    base_high, base_low, base_number = base
    largest = source[8]
    last_key = tl.full((), NO_KEY, tl.int32)
    room = tl.full((), 0, tl.int32)  # candidates that are kept of those at `last_key`
    number, high, low, equal = weigh_below(source, last_key, CHUNK)
    if (limit < vocabulary) & (base_number + number >= limit):
        wanted = limit.to(tl.float64)
        last_key = least_key(source, base_number, base_number, wanted, largest, False, CHUNK)
        number, high, low, equal = weigh_below(source, last_key, CHUNK)
        room = (limit - base_number - number).to(tl.int32)
    if top_p < 1.0:
        edge_high, edge_low = masses_of(last_key)
        kept = as_number(base_high + high + room * edge_high, base_low + low + room * edge_low)
        # At least one unit of mass, so that the best id is kept whatever `top_p` is.
        target = tl.maximum(top_p * tl.where(limit < vocabulary, kept, whole), UNIT)
        upper = tl.minimum(last_key, largest)
        key = least_key(source, base_high, base_low, target, upper, True, CHUNK)
        number, high, low, equal = weigh_below(source, key, CHUNK)
        edge_high, edge_low = masses_of(key)
        before = as_number(base_high + high, base_low + low)
        wanted = tl.ceil((target - before) / as_number(edge_high, edge_low))
        most = tl.where(key == last_key, room, equal)
        room = tl.maximum(tl.minimum(wanted, most.to(tl.float64)), 1.0).to(tl.int32)
        last_key = key
    last_id = tl.full((), 0, tl.int32) + vocabulary
    if (last_key < NO_KEY) & (room < equal):
        last_id = id_at_rank(source, last_key, room, vocabulary, CHUNK)
    return last_key, last_id
