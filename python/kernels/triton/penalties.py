"""What changes a sample's logits before the draw, and the output counts that penalties need.

Only samples that something changes get a copy of their row, so that several samples of one logit
position do not see each other's changes. One dense kernel does penalties and grammar mask; sparse
lists of bias and suppressed ids follow. Suppression comes last here and second in the reference: an
id held at -inf stays there whatever else is done to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.launch import ceil_div
from trunkline.kernels.triton.mask import allowed
from trunkline.kernels.triton.rows import (
    GROUP,
    MINUS_INFINITY,
    NUM_WARPS,
    TILE,
    maxima_of_tile,
    num_tiles,
    update_group_maxima,
)
from trunkline.plan import FREQUENCY_PENALTY, PRESENCE_PENALTY, REPETITION_PENALTY

ENTRIES = 256  # sparse entries of one program
FREQUENCY = tl.constexpr(FREQUENCY_PENALTY)
PRESENCE = tl.constexpr(PRESENCE_PENALTY)
REPETITION = tl.constexpr(REPETITION_PENALTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTables:
    """Sampling parameters by slot, in the columns of the plan's `opened_float` and `opened_int`."""

    floats: torch.Tensor  # [slots, columns] float32
    ints: torch.Tensor  # [slots, columns] int32
    seeds: torch.Tensor  # [slots] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What a step draws: S samples from L logit positions."""

    logit_index: torch.Tensor  # [S] int32
    slots: torch.Tensor  # [S] int32, rows of the slots' tables
    positions: torch.Tensor  # [S] int32, absolute position of the new token


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often each id is in a sequence's output."""

    lanes: torch.Tensor  # [S] int32, row of `table`; -1: the sample has no penalties
    table: torch.Tensor  # [lanes, V] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Grammar masks."""

    rows: torch.Tensor  # [S] int32, row of `words`; -1: the sample has no grammar
    words: torch.Tensor  # [masks, ceil(V / 32)] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """A sparse list: entry e changes logit `ids[e]` of sample `rows[e]`; nothing where that is -1.

    Suppressed ids have no values.
    """

    rows: torch.Tensor  # [E] int32
    ids: torch.Tensor  # [E] int32
    values: torch.Tensor | None = None  # [E] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """What changes the logits of a step's samples."""

    is_adjusted: torch.Tensor  # [S] int32: 0 for a sample that nothing below is for
    counts: Counts | None = None
    masks: Masks | None = None
    bias: Entries | None = None
    suppressed: Entries | None = None


def adjusted_rows(
    logits: torch.Tensor, samples: Samples, slots: SlotTables, adjustments: Adjustments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the logits of the adjusted samples, changed.

    Args:
        logits: [L, V] float32, rows contiguous; kept as they are.
        samples: of the step.
        slots: parameters by slot.
        adjustments: what is changed; ids must lie in the vocabulary.

    Returns:
        [S, V] and their group maxima; rows of samples that are not adjusted are not written.
    """
    num_samples, vocabulary = samples.logit_index.shape[0], logits.shape[1]
    tiles = num_tiles(vocabulary)
    rows = logits.new_empty((num_samples, vocabulary))
    maxima = logits.new_empty((num_samples, tiles * (TILE // GROUP)))
    lists = [entries for entries in (adjustments.bias, adjustments.suppressed) if entries]
    counts, masks = adjustments.counts, adjustments.masks
    _adjust_kernel[(num_samples, tiles)](
        logits,
        rows,
        maxima,
        samples.logit_index,
        samples.slots,
        slots.floats,
        adjustments.is_adjusted,
        None if counts is None else counts.lanes,
        None if counts is None else counts.table,
        None if masks is None else masks.rows,
        None if masks is None else masks.words,
        logits.stride(0),
        0 if masks is None else masks.words.stride(0),
        slots.floats.stride(0),
        vocabulary,
        TILE=TILE,
        GROUP=GROUP,
        WRITE_MAXIMA=not lists,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # `count * penalty + penalty` is rounded twice in the reference
    )
    for entries in lists:
        num_entries = entries.rows.shape[0]
        if num_entries > 0:
            _entries_kernel[(ceil_div(num_entries, ENTRIES),)](
                rows,
                entries.rows,
                entries.ids,
                entries.values,
                vocabulary,
                num_entries,
                BLOCK=ENTRIES,
            )
    if lists:
        update_group_maxima(rows, adjustments.is_adjusted, maxima)
    return rows, maxima


def note_tokens(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor | None,
    counts: Counts | None,
) -> None:
    """Note what was drawn, for the next step: behind `draw`, also inside a CUDA graph.

    Args:
        token_ids: [S] int32, in the vocabulary.
        slots: [S] int32; no two samples with penalties have the same.
        last_tokens: [slots] int32, the last token of every slot; overwritten.
        counts: output counts; increased.
    """
    num_samples = token_ids.shape[0]
    if num_samples > 0 and (last_tokens is not None or counts is not None):
        _note_kernel[(ceil_div(num_samples, ENTRIES),)](
            token_ids,
            slots,
            last_tokens,
            None if counts is None else counts.lanes,
            None if counts is None else counts.table,
            0 if counts is None else counts.table.stride(0),
            num_samples,
            BLOCK=ENTRIES,
        )


@triton.jit
def _adjust_kernel(
    logits,
    rows,
    maxima,
    logit_index,
    sample_slot,
    floats,
    is_adjusted,
    lanes,
    counts,
    mask_rows,
    words,
    logits_stride,
    words_stride,
    floats_stride,
    vocabulary,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WRITE_MAXIMA: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tl.load(is_adjusted + sample) == 0:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocabulary
    source = logits + tl.load(logit_index + sample).to(tl.int64) * logits_stride
    x = tl.load(source + ids, mask=inside, other=MINUS_INFINITY)
    if lanes is not None:
        lane = tl.load(lanes + sample).to(tl.int64)
        if lane >= 0:
            count = tl.load(counts + lane * vocabulary + ids, mask=inside, other=0)
            x = _penalise(x, count, floats + tl.load(sample_slot + sample) * floats_stride)
    if mask_rows is not None:
        mask_row = tl.load(mask_rows + sample).to(tl.int64)
        if mask_row >= 0:
            x = tl.where(allowed(words + mask_row * words_stride, ids, inside), x, MINUS_INFINITY)
    tl.store(rows + sample * vocabulary + ids, x, mask=inside)
    if WRITE_MAXIMA:
        groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        num_groups = tl.num_programs(1) * (TILE // GROUP)
        tl.store(maxima + sample * num_groups + groups, maxima_of_tile(x, TILE, GROUP))


@triton.jit
def _penalise(x, count, parameters):
    frequency = tl.load(parameters + FREQUENCY)
    presence = tl.load(parameters + PRESENCE)
    factor = tl.load(parameters + REPETITION)
    lowered = x - (count.to(tl.float32) * frequency + presence)
    repeated = tl.where(lowered > 0, tl.div_rn(lowered, factor), lowered * factor)
    return tl.where(count > 0, repeated, x)


@triton.jit(do_not_specialize=["num_entries"])
def _entries_kernel(
    rows, entry_rows, entry_ids, values, vocabulary, num_entries, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_entries
    row = tl.load(entry_rows + at, mask=inside, other=-1).to(tl.int64)
    token = tl.load(entry_ids + at, mask=inside, other=0)
    target = rows + row * vocabulary + token
    if values is None:
        tl.store(target, tl.full((BLOCK,), MINUS_INFINITY, tl.float32), mask=row >= 0)
    else:
        # Atomic, because an id may come twice.
        value = tl.load(values + at, mask=inside, other=0.0)
        tl.atomic_add(target, value, mask=row >= 0)


@triton.jit(do_not_specialize=["num_samples"])
def _note_kernel(
    token_ids, slots, last_tokens, lanes, counts, counts_stride, num_samples, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_samples
    token = tl.load(token_ids + at, mask=inside, other=0)
    if last_tokens is not None:
        slot = tl.load(slots + at, mask=inside, other=0)
        tl.store(last_tokens + slot, token, mask=inside)
    if lanes is not None:
        lane = tl.load(lanes + at, mask=inside, other=-1).to(tl.int64)
        tl.atomic_add(counts + lane * counts_stride + token, 1, mask=lane >= 0)
