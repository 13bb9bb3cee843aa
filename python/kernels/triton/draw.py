"""The draw itself: best id, then for samples that are not greedy the cuts and the noise.

Kernels over S samples. `prepare` reduces the group maxima of a row to its best id, which is the
whole draw of a greedy sample, and decides which scaled logits can still matter. For samples with
top-k or top-p, `levels` brackets the cut and lists the candidates at its edge, and `cut` finds it.
`draw` visits the tiles that hold ids that can win, `pick` takes the best of the tiles. Every grid
depends on shapes alone; programs that have nothing to do return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.cuts import find_cuts
from trunkline.kernels.triton.launch import ALL_REGISTERS, next_power_of_2
from trunkline.kernels.triton.levels import CUT, DRAW, NOTHING, limits_of
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
from trunkline.kernels.triton.step import DrawState, RowState
from trunkline.kernels.triton.threshold import MASSLESS, NO_KEY, keys_of
from trunkline.plan import MIN_P as MIN_P_COLUMN
from trunkline.plan import TEMPERATURE as TEMPERATURE_COLUMN

TEMPERATURE = tl.constexpr(TEMPERATURE_COLUMN)
MIN_P = tl.constexpr(MIN_P_COLUMN)
MIN_TEMPERATURE = tl.constexpr(1e-6)  # below: greedy
LEAST_MIN_P = tl.constexpr(1e-38)


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
    cuts: bool = True,
) -> Draws:
    """Draw the step's tokens.

    Args:
        logits: [L, V] float32, rows contiguous; kept as they are.
        samples: what is drawn.
        slots: parameters by slot.
        adjustments: None: no sample has penalties, suppression, mask or bias.
        is_greedy: the host knows that every sample is greedy (temperature below 1e-6): launches
            that have nothing to do then are left out.
        cuts: False: the host knows that no sample has top-k or top-p; likewise.

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
        state = DrawState(
            rows=rows,
            samples=samples,
            slots=slots,
            kind=_integers(logits, num_samples),
            bound=logits.new_empty(num_samples),
            floor=logits.new_empty(num_samples),
            last_key=_integers(logits, num_samples),
            last_id=_integers(logits, num_samples),
        )
        _launch_prepare(draws, state)
        if not is_greedy:
            if cuts:
                find_cuts(state)
            _launch_draw(draws, state)
    return draws


def _integers(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _launch_finite(draws: Draws) -> None:
    maxima = draws.rows.maxima
    num_groups = maxima.shape[1]
    _finite_kernel[(maxima.shape[0],)](
        maxima, draws.logit_finite, num_groups, GROUPS=next_power_of_2(num_groups)
    )


def _launch_prepare(draws: Draws, state: DrawState) -> None:
    rows, samples, slots = state.rows, state.samples, state.slots
    logits = rows.logits
    num_groups = rows.maxima.shape[1]
    _prepare_kernel[(state.num_samples,)](
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
        state.floor,
        state.last_key,
        state.last_id,
        state.kind,
        state.bound,
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


def _launch_draw(draws: Draws, state: DrawState) -> None:
    rows, samples, num_samples = state.rows, state.samples, state.num_samples
    logits, vocabulary = rows.logits, rows.logits.shape[1]
    tiles = num_tiles(vocabulary)
    tile_scores = logits.new_empty((num_samples, tiles))
    tile_ids = _integers(logits, num_samples, tiles)
    _draw_kernel[(num_samples, tiles)](
        logits,
        rows.adjusted,
        rows.is_adjusted,
        rows.maxima,
        rows.adjusted_maxima,
        samples.logit_index,
        samples.slots,
        samples.positions,
        state.slots.seeds,
        rows.best,
        rows.temperature,
        state.kind,
        state.floor,
        state.last_key,
        state.last_id,
        tile_scores,
        tile_ids,
        logits.stride(0),
        vocabulary,
        rows.maxima.shape[1],
        TILE=TILE,
        GROUP=GROUP,
        ADJUSTS=rows.adjusted is not None,
        num_warps=NUM_WARPS,
        maxnreg=ALL_REGISTERS,
        enable_fp_fusion=False,
    )
    _pick_kernel[(num_samples,)](
        state.kind,
        tile_scores,
        tile_ids,
        draws.token_ids,
        vocabulary,
        tiles,
        TILES=next_power_of_2(tiles),
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
    floors,
    last_keys,
    last_ids,
    kinds,
    bounds,
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
        min_p = tl.load(floats + slot * floats_stride + MIN_P)
        # The best id is never cut: what cannot beat it, with whatever noise, cannot be drawn.
        at = best_id + tl.zeros((1,), tl.int32)
        word = words_of_ids(at, tl.load(positions + sample), tl.load(seeds + slot))
        floor = tl.max(exact_noise(word), 0) - LARGEST_NOISE
        if min_p > 0:
            lowest = tl.log(tl.maximum(min_p, LEAST_MIN_P).to(tl.float64)).to(tl.float32)
            floor = tl.maximum(floor, lowest)
        limit, top_p = limits_of(ints, floats, slot, ints_stride, floats_stride, vocabulary)
        bound = tl.full((), MASSLESS, tl.float32)
        if (limit < vocabulary) & (limit <= num_groups):
            # So many groups have a best of at least this: what top-k keeps is not below.
            ranked = tl.sort(group_best, descending=True)
            nth = tl.max(tl.where(groups == limit - 1, ranked, MINUS_INFINITY), 0)
            bound = tl.maximum(scale(nth, best, temperature), bound)
        tl.store(kinds + sample, tl.where((limit < vocabulary) | (top_p < 1.0), CUT, DRAW))
        tl.store(floors + sample, floor)
        tl.store(last_keys + sample, NO_KEY)
        tl.store(last_ids + sample, vocabulary)
        tl.store(bounds + sample, bound)


@triton.jit
def _draw_kernel(
    logits,
    adjusted,
    is_adjusted,
    maxima,
    adjusted_maxima,
    logit_index,
    sample_slot,
    positions,
    seeds,
    best_logit,
    temperatures,
    kinds,
    floors,
    last_keys,
    last_ids,
    tile_scores,
    tile_ids,
    logits_stride,
    vocabulary,
    num_groups,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    sample = tl.program_id(0)
    tile = tl.program_id(1)
    if tl.load(kinds + sample) == NOTHING:
        return
    best = tl.load(best_logit + sample)
    temperature = tl.load(temperatures + sample)
    floor = tl.load(floors + sample)
    last_key = tl.load(last_keys + sample)
    of_row = row_of_sample(
        maxima, num_groups, logit_index, adjusted_maxima, is_adjusted, sample, num_groups, ADJUSTS
    )
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    highest = scale(tl.max(tl.load(of_row + groups), 0), best, temperature)
    score = tl.full((), MINUS_INFINITY, tl.float32)
    chosen = tl.full((), 0, tl.int32)
    if (highest >= floor) & (keys_of(highest) <= last_key):
        row = row_of_sample(
            logits, logits_stride, logit_index, adjusted, is_adjusted, sample, vocabulary, ADJUSTS
        )
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(row + ids, mask=ids < vocabulary, other=MINUS_INFINITY)
        scaled = scale(x, best, temperature)
        keys = keys_of(scaled)
        kept = (keys < last_key) | ((keys == last_key) & (ids <= tl.load(last_ids + sample)))
        seed = tl.load(seeds + tl.load(sample_slot + sample))
        words = words_in_order(tile * (TILE // 4), tl.load(positions + sample), seed, TILE // 4)
        score, chosen = improve(scaled, words, ids, kept & (scaled >= floor), score, chosen)
    at = sample.to(tl.int64) * tl.num_programs(1) + tile
    tl.store(tile_scores + at, score)
    tl.store(tile_ids + at, chosen)


@triton.jit
def _pick_kernel(
    kinds, tile_scores, tile_ids, token_ids, vocabulary, num_tiles, TILES: tl.constexpr
):
    sample = tl.program_id(0)
    if tl.load(kinds + sample) == NOTHING:
        return
    tiles = tl.arange(0, TILES)
    at = sample.to(tl.int64) * num_tiles + tiles
    scores = tl.load(tile_scores + at, mask=tiles < num_tiles, other=MINUS_INFINITY)
    ids = tl.load(tile_ids + at, mask=tiles < num_tiles, other=0)
    tl.store(token_ids + sample, tl.min(tl.where(scores == tl.max(scores, 0), ids, vocabulary), 0))
