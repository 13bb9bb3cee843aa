"""The draw itself: best id, noise, and for samples that cut by rank the candidates.

Three kernels over S samples: `prepare` reduces the group maxima of a row to its best id, which is
the whole draw of a greedy sample, and decides which scaled logits can still matter; `tiles` visits
the tiles that hold such logits: without top-k and top-p it draws there and then, with them it lists
candidates; `finish` cuts the candidates and draws from the rest, or takes the best of the tiles.
Every grid depends on shapes alone; programs that have nothing to do return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.launch import next_power_of_2
from trunkline.kernels.triton.noise import (
    LARGEST_NOISE,
    exact_noise,
    improve,
    words_in_order,
    words_of_ids,
)
from trunkline.kernels.triton.penalties import Adjustments, Samples, SlotTables, adjusted_rows
from trunkline.kernels.triton.rows import (
    GROUP,
    INFINITY,
    MINUS_INFINITY,
    NUM_WARPS,
    TILE,
    group_maxima,
    num_tiles,
    row_of_sample,
    scale,
)
from trunkline.kernels.triton.threshold import (
    MASSLESS,
    NO_KEY,
    UNIT,
    as_number,
    id_at_rank,
    keys_of,
    least_key,
    load_candidates,
    masses_of,
    weigh_below,
)
from trunkline.plan import MIN_P as MIN_P_COLUMN
from trunkline.plan import TEMPERATURE as TEMPERATURE_COLUMN
from trunkline.plan import TOP_K as TOP_K_COLUMN
from trunkline.plan import TOP_P as TOP_P_COLUMN

CAPACITY = 8192  # candidates that are listed; with more the row is read again
CHUNK = 2048  # candidates at once
FINISH_WARPS = 8

TEMPERATURE = tl.constexpr(TEMPERATURE_COLUMN)
TOP_P = tl.constexpr(TOP_P_COLUMN)
MIN_P = tl.constexpr(MIN_P_COLUMN)
TOP_K = tl.constexpr(TOP_K_COLUMN)
MIN_TEMPERATURE = tl.constexpr(1e-6)  # below: greedy
LEAST_MIN_P = tl.constexpr(1e-38)
MARGIN = tl.constexpr(0.01)  # of bounds on scaled logits that are estimates

# What is left to do for a sample.
NOTHING = tl.constexpr(0)
DRAW = tl.constexpr(1)
CUT_AND_DRAW = tl.constexpr(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What later kernels need of a step's rows."""

    logits: torch.Tensor  # [L, V] float32
    maxima: torch.Tensor  # [L, groups] float32, NaN: not finite
    adjusted: torch.Tensor | None  # [S, V] float32, written where `is_adjusted`
    adjusted_maxima: torch.Tensor | None  # [S, groups] float32
    is_adjusted: torch.Tensor | None  # [S] int32
    best: torch.Tensor  # [S] float32, largest logit
    temperature: torch.Tensor  # [S] float32, 1 for greedy samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """A step's tokens; those of failed entries mean nothing, but lie in the vocabulary."""

    token_ids: torch.Tensor  # [S] int32
    sample_possible: torch.Tensor  # [S] int32: a token was left after masks and suppression
    logit_finite: torch.Tensor  # [L] int32: all raw logits there are finite
    rows: RowState


def draw(
    logits: torch.Tensor,
    samples: Samples,
    slots: SlotTables,
    adjustments: Adjustments | None = None,
    *,
    is_greedy: bool = False,
) -> Draws:
    """Draw the step's tokens.

    Args:
        logits: [L, V] float32, rows contiguous; kept as they are.
        samples: what is drawn.
        slots: parameters by slot.
        adjustments: None: no sample has penalties, suppression, mask or bias.
        is_greedy: the host knows that every sample is greedy (temperature below 1e-6): launches
            that have nothing to do then are left out.

    Returns:
        Fresh tensors on the logits' device.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype}, strides {logits.stride()}: float32 rows")
    num_samples = samples.logit_index.shape[0]
    maxima = group_maxima(logits)
    adjusted = adjusted_maxima = None
    if adjustments is not None and num_samples > 0:
        adjusted, adjusted_maxima = adjusted_rows(logits, samples, slots, adjustments)
    rows = RowState(
        logits=logits,
        maxima=maxima,
        adjusted=adjusted,
        adjusted_maxima=adjusted_maxima,
        is_adjusted=None if adjustments is None else adjustments.is_adjusted,
        best=logits.new_empty(num_samples),
        temperature=logits.new_empty(num_samples),
    )
    draws = Draws(
        token_ids=_integers(logits, num_samples),
        sample_possible=_integers(logits, num_samples),
        logit_finite=_integers(logits, logits.shape[0]),
        rows=rows,
    )
    if logits.shape[0] > 0:
        _launch_finite(draws)
    if num_samples > 0:
        work = _prepare(draws, samples, slots)
        if not is_greedy:
            _draw_random(draws, samples, slots, work)
    return draws


def _integers(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    kind: torch.Tensor  # [S] int32
    floor: torch.Tensor  # [S] float32, scaled logits below cannot be drawn
    bound: torch.Tensor  # [S] float32, scaled logits below are no candidates
    count: torch.Tensor  # [S] int32, candidates so far
    mass: torch.Tensor  # [S, 2] int64, of the whole row


def _launch_finite(draws: Draws) -> None:
    maxima = draws.rows.maxima
    num_groups = maxima.shape[1]
    _finite_kernel[(maxima.shape[0],)](
        maxima, draws.logit_finite, num_groups, GROUPS=next_power_of_2(num_groups)
    )


def _prepare(draws: Draws, samples: Samples, slots: SlotTables) -> _Work:
    rows, logits = draws.rows, draws.rows.logits
    num_samples = samples.logit_index.shape[0]
    num_groups = rows.maxima.shape[1]
    work = _Work(
        kind=_integers(logits, num_samples),
        floor=logits.new_empty(num_samples),
        bound=logits.new_empty(num_samples),
        count=_integers(logits, num_samples),
        mass=logits.new_empty((num_samples, 2), dtype=torch.int64),
    )
    _prepare_kernel[(num_samples,)](
        logits,
        rows.adjusted,
        rows.is_adjusted,
        rows.maxima,
        rows.adjusted_maxima,
        samples.logit_index,
        samples.slots,
        samples.positions,
        slots.floats,
        slots.ints,
        slots.seeds,
        draws.token_ids,
        draws.sample_possible,
        rows.best,
        rows.temperature,
        work.kind,
        work.floor,
        work.bound,
        work.count,
        work.mass,
        logits.stride(0),
        slots.floats.stride(0),
        slots.ints.stride(0),
        logits.shape[1],
        num_groups,
        GROUP=GROUP,
        GROUPS=next_power_of_2(num_groups),
        ADJUSTS=rows.adjusted is not None,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return work


def _draw_random(draws: Draws, samples: Samples, slots: SlotTables, work: _Work) -> None:
    rows, logits = draws.rows, draws.rows.logits
    num_samples, vocabulary = samples.logit_index.shape[0], logits.shape[1]
    tiles = num_tiles(vocabulary)
    capacity = min(CAPACITY, vocabulary)
    listed_scaled = logits.new_empty((num_samples, capacity))
    listed_ids = _integers(logits, num_samples, capacity)
    tile_scores = logits.new_empty((num_samples, tiles))
    tile_ids = _integers(logits, num_samples, tiles)
    shared = (
        logits,
        rows.adjusted,
        rows.is_adjusted,
        samples.logit_index,
        samples.slots,
        samples.positions,
        slots.ints,
        slots.floats,
        slots.seeds,
        rows.best,
        rows.temperature,
        work.kind,
        work.floor,
        work.bound,
        work.count,
        work.mass,
        listed_scaled,
        listed_ids,
        tile_scores,
        tile_ids,
    )
    strides = (logits.stride(0), slots.ints.stride(0), slots.floats.stride(0), vocabulary, capacity)
    _tiles_kernel[(num_samples, tiles)](
        *shared,
        rows.maxima,
        rows.adjusted_maxima,
        *strides,
        rows.maxima.shape[1],
        TILE=TILE,
        GROUP=GROUP,
        ADJUSTS=rows.adjusted is not None,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    _finish_kernel[(num_samples,)](
        *shared,
        draws.token_ids,
        *strides,
        tiles,
        TILES=next_power_of_2(tiles),
        CHUNK=min(CHUNK, next_power_of_2(vocabulary)),
        ADJUSTS=rows.adjusted is not None,
        num_warps=FINISH_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit
def _finite_kernel(maxima, logit_finite, num_groups, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    best = tl.load(maxima + row * num_groups + groups, mask=groups < num_groups, other=0.0)
    is_bad = tl.max((best != best).to(tl.int32), 0)
    tl.store(logit_finite + row, 1 - is_bad)


@triton.jit
def _prepare_kernel(
    logits,
    adjusted,
    is_adjusted,
    maxima,
    adjusted_maxima,
    logit_index,
    sample_slot,
    positions,
    floats,
    ints,
    seeds,
    token_ids,
    possible,
    best_logit,
    temperatures,
    kinds,
    floors,
    bounds,
    counts,
    masses,
    logits_stride,
    floats_stride,
    ints_stride,
    vocabulary,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    sample = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    inside = groups < num_groups
    raw = maxima + tl.load(logit_index + sample).to(tl.int64) * num_groups
    raw_best = tl.load(raw + groups, mask=inside, other=MINUS_INFINITY)
    is_finite = tl.max((raw_best != raw_best).to(tl.int32), 0) == 0
    of_row = row_of_sample(
        maxima, num_groups, logit_index, adjusted_maxima, is_adjusted, sample, num_groups, ADJUSTS
    )
    group_best = tl.load(of_row + groups, mask=inside, other=MINUS_INFINITY)
    group_best = tl.where(group_best == group_best, group_best, MINUS_INFINITY)
    best = tl.max(group_best, 0)
    is_possible = (best > MINUS_INFINITY) & (best < INFINITY)

    row = row_of_sample(
        logits, logits_stride, logit_index, adjusted, is_adjusted, sample, vocabulary, ADJUSTS
    )
    first = tl.min(tl.where(group_best == best, groups, GROUPS), 0)
    ids = first * GROUP + tl.arange(0, GROUP)
    x = tl.load(row + ids, mask=ids < vocabulary, other=MINUS_INFINITY)
    best_id = tl.min(tl.where(x == best, ids, vocabulary), 0)
    best_id = tl.where(best_id < vocabulary, best_id, 0)  # there is none in a failed row
    tl.store(token_ids + sample, best_id)
    tl.store(possible + sample, (is_possible | (is_finite == 0)).to(tl.int32))

    slot = tl.load(sample_slot + sample)
    temperature = tl.load(floats + slot * floats_stride + TEMPERATURE)
    is_random = temperature >= MIN_TEMPERATURE
    temperature = tl.where(is_random, temperature, 1.0)
    best = tl.where(is_possible, best, 0.0)
    tl.store(best_logit + sample, best)
    tl.store(temperatures + sample, temperature)
    tl.store(kinds + sample, NOTHING)
    if is_random & is_possible & is_finite:
        top_p = tl.load(floats + slot * floats_stride + TOP_P)
        min_p = tl.load(floats + slot * floats_stride + MIN_P)
        top_k = tl.load(ints + slot * ints_stride + TOP_K)
        limit = tl.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
        # The best id is never cut: what cannot beat it, with whatever noise, cannot be drawn.
        word = words_of_ids(best_id + tl.zeros((1,), tl.int32), tl.load(positions + sample),
                            tl.load(seeds + slot))  # fmt: skip
        floor = tl.max(exact_noise(word), 0) - LARGEST_NOISE
        if min_p > 0:
            lowest = tl.log(tl.maximum(min_p, LEAST_MIN_P).to(tl.float64)).to(tl.float32)
            floor = tl.maximum(floor, lowest)
        bound = floor
        if (limit < vocabulary) & (limit <= num_groups):
            # So many groups have a best of at least this: no more than `limit` ids lie above.
            ranked = tl.sort(group_best, descending=True)
            nth = tl.max(tl.where(groups == limit - 1, ranked, MINUS_INFINITY), 0)
            nth_scaled = scale(nth, best, temperature)
            # With top-p the mass of all that top-k keeps is wanted, drawn or not.
            bound = tl.where(top_p < 1.0, nth_scaled, tl.maximum(floor, nth_scaled))
        elif (limit < vocabulary) & (top_p < 1.0):
            bound = tl.full((), MASSLESS, tl.float32)
        elif top_p < 1.0:
            # What lies below has a mass of less than `1 - top_p` of the best id's.
            width = vocabulary.to(tl.float32)
            bound = tl.maximum(floor, -tl.log(width) + tl.log(1.0 - top_p) - MARGIN)
        cuts = (limit < vocabulary) | (top_p < 1.0)
        tl.store(kinds + sample, tl.where(cuts, CUT_AND_DRAW, DRAW))
        tl.store(floors + sample, floor)
        tl.store(bounds + sample, bound)
        tl.store(counts + sample, 0)
        tl.store(masses + 2 * sample, tl.zeros((), tl.int64))
        tl.store(masses + 2 * sample + 1, tl.zeros((), tl.int64))


@triton.jit
def _tiles_kernel(
    logits,
    adjusted,
    is_adjusted,
    logit_index,
    sample_slot,
    positions,
    ints,
    floats,
    seeds,
    best_logit,
    temperatures,
    kinds,
    floors,
    bounds,
    counts,
    masses,
    listed_scaled,
    listed_ids,
    tile_scores,
    tile_ids,
    maxima,
    adjusted_maxima,
    logits_stride,
    ints_stride,
    floats_stride,
    vocabulary,
    capacity,
    num_groups,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    sample = tl.program_id(0)
    tile = tl.program_id(1)
    kind = tl.load(kinds + sample)
    if kind == NOTHING:
        return
    slot = tl.load(sample_slot + sample)
    best = tl.load(best_logit + sample)
    temperature = tl.load(temperatures + sample)
    of_row = row_of_sample(
        maxima, num_groups, logit_index, adjusted_maxima, is_adjusted, sample, num_groups, ADJUSTS
    )
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    highest = scale(tl.max(tl.load(of_row + groups), 0), best, temperature)
    row = row_of_sample(
        logits, logits_stride, logit_index, adjusted, is_adjusted, sample, vocabulary, ADJUSTS
    )
    ids = tile * TILE + tl.arange(0, TILE)
    if kind == DRAW:
        floor = tl.load(floors + sample)
        score = tl.full((), MINUS_INFINITY, tl.float32)
        chosen = tl.full((), 0, tl.int32)
        if highest >= floor:
            x = tl.load(row + ids, mask=ids < vocabulary, other=MINUS_INFINITY)
            scaled = scale(x, best, temperature)
            position = tl.load(positions + sample)
            seed = tl.load(seeds + slot)
            words = words_in_order(tile * (TILE // 4), position, seed, TILE // 4)
            score, chosen = improve(scaled, words, ids, scaled >= floor, score, chosen)
        tiles = tl.num_programs(1)
        tl.store(tile_scores + sample.to(tl.int64) * tiles + tile, score)
        tl.store(tile_ids + sample.to(tl.int64) * tiles + tile, chosen)
    else:
        bound = tl.load(bounds + sample)
        top_k = tl.load(ints + slot * ints_stride + TOP_K)
        top_p = tl.load(floats + slot * floats_stride + TOP_P)
        needs_mass = ((top_k <= 0) | (top_k >= vocabulary)) & (top_p < 1.0)
        if (highest >= bound) | (needs_mass & (highest >= MASSLESS)):
            x = tl.load(row + ids, mask=ids < vocabulary, other=MINUS_INFINITY)
            scaled = scale(x, best, temperature)
            if needs_mass:
                high, low = masses_of(keys_of(scaled))
                tl.atomic_add(masses + 2 * sample, tl.sum(high, 0))
                tl.atomic_add(masses + 2 * sample + 1, tl.sum(low, 0))
            is_candidate = (scaled >= bound) & (scaled > MINUS_INFINITY)
            flags = is_candidate.to(tl.int32)
            first = tl.atomic_add(counts + sample, tl.sum(flags, 0))
            at = first + tl.cumsum(flags, 0) - 1
            target = sample.to(tl.int64) * capacity + at
            is_listed = is_candidate & (at < capacity)
            tl.store(listed_scaled + target, scaled, mask=is_listed)
            tl.store(listed_ids + target, ids, mask=is_listed)


@triton.jit
def _finish_kernel(
    logits,
    adjusted,
    is_adjusted,
    logit_index,
    sample_slot,
    positions,
    ints,
    floats,
    seeds,
    best_logit,
    temperatures,
    kinds,
    floors,
    bounds,
    counts,
    masses,
    listed_scaled,
    listed_ids,
    tile_scores,
    tile_ids,
    token_ids,
    logits_stride,
    ints_stride,
    floats_stride,
    vocabulary,
    capacity,
    num_tiles,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    sample = tl.program_id(0)
    kind = tl.load(kinds + sample)
    if kind == NOTHING:
        return
    if kind == DRAW:
        tiles = tl.arange(0, TILES)
        at = sample.to(tl.int64) * num_tiles + tiles
        scores = tl.load(tile_scores + at, mask=tiles < num_tiles, other=MINUS_INFINITY)
        ids = tl.load(tile_ids + at, mask=tiles < num_tiles, other=0)
        best_score = tl.max(scores, 0)
        tl.store(token_ids + sample, tl.min(tl.where(scores == best_score, ids, vocabulary), 0))
        return
    slot = tl.load(sample_slot + sample)
    row = row_of_sample(
        logits, logits_stride, logit_index, adjusted, is_adjusted, sample, vocabulary, ADJUSTS
    )
    count = tl.load(counts + sample)
    is_listed = count <= capacity
    first = sample.to(tl.int64) * capacity
    source = (
        listed_scaled + first,
        listed_ids + first,
        row,
        tl.where(is_listed, count, vocabulary),
        is_listed,
        tl.load(best_logit + sample),
        tl.load(temperatures + sample),
        tl.load(bounds + sample),
    )
    top_k = tl.load(ints + slot * ints_stride + TOP_K)
    top_p = tl.load(floats + slot * floats_stride + TOP_P).to(tl.float64)
    limit = tl.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    whole = as_number(tl.load(masses + 2 * sample), tl.load(masses + 2 * sample + 1))
    last_key, last_id = _cut(source, count, limit, top_p, whole, vocabulary, CHUNK)

    floor = tl.load(floors + sample)
    position = tl.load(positions + sample)
    seed = tl.load(seeds + slot)
    score = tl.full((), MINUS_INFINITY, tl.float32)
    chosen = tl.full((), 0, tl.int32)
    for start in range(0, source[3], CHUNK):
        keys, ids = load_candidates(source, start, CHUNK)
        scaled = -keys.to(tl.float32, bitcast=True)
        kept = (keys < last_key) | ((keys == last_key) & (ids <= last_id))
        kept = kept & (scaled >= floor) & (keys < NO_KEY)
        if tl.max(kept.to(tl.int32), 0) > 0:
            words = words_of_ids(ids, position, seed)
            score, chosen = improve(scaled, words, ids, kept, score, chosen)
    tl.store(token_ids + sample, chosen)


@triton.jit
def _cut(source, count, limit, top_p, whole, vocabulary, CHUNK: tl.constexpr):
    """What top-k and top-p leave: everything before (last key, last id), that included."""
    last_key = tl.full((), NO_KEY, tl.int32)
    room = tl.full((), 0, tl.int32)  # candidates that are kept of those at `last_key`
    if count > limit:
        last_key = least_key(source, limit.to(tl.float64), NO_KEY - 1, False, CHUNK)
    number, high, low, equal = weigh_below(source, last_key, CHUNK)
    if count > limit:
        room = limit - number
    if top_p < 1.0:
        edge_high, edge_low = masses_of(last_key)
        available = as_number(high + room * edge_high, low + room * edge_low)
        # At least one unit of mass, so that the best id is kept whatever `top_p` is.
        target = tl.maximum(top_p * tl.where(limit < vocabulary, available, whole), UNIT)
        # Less than the target is there only if the cut lies below all candidates.
        if available >= target:
            key = least_key(source, target, last_key, True, CHUNK)
            number, high, low, equal_now = weigh_below(source, key, CHUNK)
            edge_high, edge_low = masses_of(key)
            wanted = (target - as_number(high, low)) / as_number(edge_high, edge_low)
            most = tl.where(key == last_key, room, equal_now)
            room = tl.maximum(tl.minimum(tl.ceil(wanted), most.to(tl.float64)), 1.0).to(tl.int32)
            last_key = key
            equal = equal_now
    last_id = tl.full((), 0, tl.int32) + vocabulary
    if (last_key < NO_KEY) & (room < equal):
        last_id = id_at_rank(source, last_key, room, vocabulary, CHUNK)
    return last_key, last_id
