"""Finding the cuts of top-k and top-p for all samples of a step: see `levels` and `threshold`."""

from __future__ import annotations

import triton
import triton.language as tl

from trunkline.kernels.triton.launch import ALL_REGISTERS, next_power_of_2
from trunkline.kernels.triton.levels import (
    CUT,
    LISTED,
    NUM_LEVELS,
    SUMS,
    WHOLE,
    Brackets,
    limits_of,
    narrow_kernel,
    new_brackets,
    survey_kernel,
)
from trunkline.kernels.triton.rows import GROUP, NUM_WARPS, TILE, num_tiles, row_of_sample
from trunkline.kernels.triton.step import DrawState
from trunkline.kernels.triton.threshold import as_number, cut

CHUNK = 1024  # candidates at once
CUT_WARPS = 8


def find_cuts(state: DrawState) -> None:
    """Find what top-k and top-p keep; writes `last_key` and `last_id` where they cut.

    Args:
        state: prepared; its `kind` becomes `DRAW` where nothing that may be drawn is cut.
    """
    brackets = new_brackets(state.num_samples, state.rows.logits)
    for stage in (1, 2):
        _launch_survey(state, brackets, stage)
        _launch_narrow(state, brackets, stage)
    _launch_survey(state, brackets, 3)
    _launch_cut(state, brackets)


def _launch_cut(state: DrawState, brackets: Brackets) -> None:
    rows, samples, slots = state.rows, state.samples, state.slots
    logits = rows.logits
    vocabulary = logits.shape[1]
    _cut_kernel[(state.num_samples,)](
        logits,
        rows.adjusted,
        rows.is_adjusted,
        samples.logit_index,
        samples.slots,
        slots.ints,
        slots.floats,
        rows.best,
        rows.temperature,
        state.kind,
        brackets.low,
        brackets.high,
        brackets.sums,
        brackets.count,
        brackets.listed_scaled,
        brackets.listed_ids,
        state.last_key,
        state.last_id,
        logits.stride(0),
        slots.ints.stride(0),
        slots.floats.stride(0),
        vocabulary,
        brackets.listed_ids.shape[1],
        SUMS=SUMS,
        CHUNK=min(CHUNK, next_power_of_2(vocabulary)),
        ADJUSTS=rows.adjusted is not None,
        num_warps=CUT_WARPS,
        maxnreg=ALL_REGISTERS,
        enable_fp_fusion=False,
    )


def _launch_survey(state: DrawState, brackets: Brackets, stage: int) -> None:
    rows, samples, slots = state.rows, state.samples, state.slots
    logits = rows.logits
    vocabulary = logits.shape[1]
    survey_kernel[(state.num_samples, num_tiles(vocabulary))](
        logits,
        rows.adjusted,
        rows.is_adjusted,
        rows.maxima,
        rows.adjusted_maxima,
        samples.logit_index,
        samples.slots,
        slots.ints,
        slots.floats,
        rows.best,
        rows.temperature,
        state.kind,
        state.bound,
        brackets.low,
        brackets.high,
        brackets.shift,
        brackets.levels[min(stage, 2) - 1],
        brackets.sums,
        brackets.count,
        brackets.listed_scaled,
        brackets.listed_ids,
        logits.stride(0),
        slots.ints.stride(0),
        slots.floats.stride(0),
        vocabulary,
        brackets.listed_ids.shape[1],
        rows.maxima.shape[1],
        STAGE=stage,
        TILE=TILE,
        GROUP=GROUP,
        NUM_LEVELS=NUM_LEVELS,
        SUMS=SUMS,
        ADJUSTS=rows.adjusted is not None,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def _launch_narrow(state: DrawState, brackets: Brackets, stage: int) -> None:
    samples, slots = state.samples, state.slots
    narrow_kernel[(state.num_samples,)](
        samples.slots,
        slots.ints,
        slots.floats,
        state.kind,
        state.floor,
        brackets.low,
        brackets.high,
        brackets.shift,
        brackets.levels[stage - 1],
        brackets.sums,
        slots.ints.stride(0),
        slots.floats.stride(0),
        state.rows.logits.shape[1],
        STAGE=stage,
        NUM_LEVELS=NUM_LEVELS,
        SUMS=SUMS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit
def _cut_kernel(
    logits,
    adjusted,
    is_adjusted,
    logit_index,
    sample_slot,
    ints,
    floats,
    best_logit,
    temperatures,
    kinds,
    lows,
    highs,
    sums,
    counts,
    listed_scaled,
    listed_ids,
    last_keys,
    last_ids,
    logits_stride,
    ints_stride,
    floats_stride,
    vocabulary,
    capacity,
    SUMS: tl.constexpr,
    CHUNK: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    sample = tl.program_id(0)
    if tl.load(kinds + sample) != CUT:
        return
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
        tl.load(lows + sample),
        tl.load(highs + sample),
    )
    slot = tl.load(sample_slot + sample)
    limit, top_p = limits_of(ints, floats, slot, ints_stride, floats_stride, vocabulary)
    sums += sample.to(tl.int64) * SUMS
    whole = as_number(tl.load(sums + WHOLE), tl.load(sums + WHOLE + 1))
    base = (tl.load(sums + LISTED), tl.load(sums + LISTED + 1), tl.load(sums + LISTED + 2))
    last_key, last_id = cut(source, base, limit, top_p, whole, vocabulary, CHUNK)
    tl.store(last_keys + sample, last_key)
    tl.store(last_ids + sample, last_id)
