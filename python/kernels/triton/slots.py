"""What lives on the device from step to step, by slot, and what the host must know of it.

The last row of every table belongs to no sequence: the padding rows of captured steps use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import FloatArray, IntArray, ProgramSizes
from trunkline.kernels.triton.draw import MIN_TEMPERATURE
from trunkline.plan import (
    FLAG_GRAMMAR,
    FLAG_PROCESSED,
    FREQUENCY_PENALTY,
    MIN_NEW_TOKENS,
    OPEN_FLAGS,
    PRESENCE_PENALTY,
    PROMPT_LEN,
    REPETITION_PENALTY,
    SAMPLE_LOGPROB,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Plan,
)

Array = npt.NDArray[Any]
PARAMETERS = 8  # records of `opened_float` and `opened_int`


@dataclass(frozen=True, slots=True)
class Entries:
    """Sparse list of a step: entry e is for id `ids[e]` of sample `rows[e]`."""

    rows: IntArray
    ids: IntArray
    values: FloatArray


@dataclass(slots=True)
class _Lists:
    """What a slot brings along that has no fixed size."""

    bias_ids: IntArray
    bias_values: FloatArray
    suppressed_ids: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNeeds:
    """What the samples of one step need beyond temperature, top-k, top-p and min-p."""

    is_adjusted: npt.NDArray[np.bool_]  # [samples] something changes the logits
    grammar_rows: IntArray
    processed_rows: IntArray
    logprob_rows: IntArray
    lanes: IntArray  # [samples] row of the counts table, -1: no penalties
    bias: Entries
    suppressed: Entries
    wants_logprobs: bool  # of anything
    is_greedy: bool  # every sample takes the best id
    has_cuts: bool  # top-k or top-p of a sample may leave something out

    @property
    def is_plain(self) -> bool:
        """Nothing of it."""
        return not self.wants_logprobs and not self.is_adjusted.any()


class HostSlots:
    """Parameters of the open slots, as arrays by slot."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._is_open = np.zeros(num_slots, np.bool_)
        self._ints = np.zeros((num_slots, PARAMETERS), np.int32)
        self._floats = np.zeros((num_slots, PARAMETERS), np.float32)
        self._lane = np.full(num_slots, -1, np.int32)
        self._has_lists = np.zeros(num_slots, np.bool_)
        self._lists: dict[int, _Lists] = {}

    @property
    def num_lanes(self) -> int:
        """Lanes that the table of counts must have, for those in use.

        It falls when slots close: a step that fails because the table cannot grow ends its
        requests, and those after it do without their lanes.
        """
        return int(self._lane.max(initial=-1)) + 1

    def check(self, plan: Plan) -> None:
        """Refuse what `update` and `needs` could not do; nothing has changed then.

        Raises:
            ValueError: an id lies outside the vocabulary, or a sample's slot will not be open.
        """
        is_open = self._is_open.copy()
        is_open[plan.closed_slots] = False
        is_open[plan.opened_slots] = True
        closed = plan.sample_slot[~is_open[plan.sample_slot]]
        if closed.size:
            raise ValueError(
                f"the plan samples for slots {np.unique(closed).tolist()}, which are not open"
            )
        for name in ("bias_ids", "suppressed_ids", "output_ids", "score_ids"):
            ids: IntArray = getattr(plan, name)
            if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
                raise ValueError(
                    f"{name} of the plan holds ids from {ids.min()} to {ids.max()}, the vocabulary "
                    f"has {self._vocab_size}; requests are to be refused before"
                )

    def update(self, plan: Plan) -> IntArray:
        """Close and open slots; the opened ones' lanes in the table of counts."""
        for slot in plan.closed_slots.tolist():
            self._close(slot)
        for index, slot in enumerate(plan.opened_slots.tolist()):
            self._close(slot)
            self._open(plan, index, slot)
        return self._lane[plan.opened_slots]

    def _close(self, slot: int) -> None:
        self._is_open[slot] = False
        self._has_lists[slot] = False
        self._lists.pop(slot, None)
        self._lane[slot] = -1

    def _open(self, plan: Plan, index: int, slot: int) -> None:
        self._is_open[slot] = True
        self._ints[slot] = plan.opened_int[index]
        floats = self._floats[slot] = plan.opened_float[index]
        bias = slice(*plan.bias_offsets[index : index + 2].tolist())
        suppressed = slice(*plan.suppressed_offsets[index : index + 2].tolist())
        if bias.stop > bias.start or suppressed.stop > suppressed.start:
            self._has_lists[slot] = True
            # Copies: the plan's arena is written again.
            self._lists[slot] = _Lists(
                plan.bias_ids[bias].copy(),
                plan.bias_values[bias].copy(),
                plan.suppressed_ids[suppressed].copy(),
            )
        additive = floats[FREQUENCY_PENALTY] != 0 or floats[PRESENCE_PENALTY] != 0
        if additive or floats[REPETITION_PENALTY] != 1:
            self._lane[slot] = self._free_lane()

    def _free_lane(self) -> int:
        """The lowest that no slot has."""
        is_taken = np.zeros(self._lane.size + 1, np.bool_)
        is_taken[self._lane[self._lane >= 0]] = True
        return int(is_taken.argmin())

    def needs(self, plan: Plan) -> SampleNeeds:
        """What the plan's samples need; their slots are open."""
        slots = plan.sample_slot
        flags = self._ints[slots, OPEN_FLAGS]
        logprob_rows = np.flatnonzero(plan.sample_flags & SAMPLE_LOGPROB).astype(np.int32)
        lanes = self._lane[slots]
        bias, suppressed = self._entries(plan)
        grammar = np.flatnonzero(flags & FLAG_GRAMMAR).astype(np.int32)
        processed = np.flatnonzero(flags & FLAG_PROCESSED).astype(np.int32)
        floats, top_k = self._floats[slots], self._ints[slots, TOP_K]
        is_random = floats[:, TEMPERATURE] >= MIN_TEMPERATURE.value
        cuts = ((top_k > 0) & (top_k < self._vocab_size)) | (floats[:, TOP_P] < 1)
        is_adjusted = lanes >= 0
        for rows in (grammar, bias.rows, suppressed.rows):
            is_adjusted[rows] = True
        return SampleNeeds(
            is_adjusted=is_adjusted,
            grammar_rows=grammar,
            processed_rows=processed,
            logprob_rows=logprob_rows,
            lanes=lanes,
            bias=bias,
            suppressed=suppressed,
            wants_logprobs=bool(logprob_rows.size or plan.score_ids.size or plan.logit_top_n.any()),
            is_greedy=not is_random.any(),
            has_cuts=bool((is_random & cuts).any()),
        )

    def _entries(self, plan: Plan) -> tuple[Entries, Entries]:
        bias, suppressed = _Gathered(), _Gathered()
        for row in np.flatnonzero(self._has_lists[plan.sample_slot]).tolist():
            slot = int(plan.sample_slot[row])
            lists = self._lists[slot]
            bias.add(row, lists.bias_ids, lists.bias_values)
            num_outputs = int(plan.sample_position[row]) - int(self._ints[slot, PROMPT_LEN])
            if num_outputs < int(self._ints[slot, MIN_NEW_TOKENS]):
                ids = lists.suppressed_ids
                suppressed.add(row, ids, np.zeros(ids.size, np.float32))
        return bias.entries(), suppressed.entries()


@dataclass(slots=True)
class _Gathered:
    rows: list[IntArray] = field(default_factory=lambda: [np.zeros(0, np.int32)])
    ids: list[IntArray] = field(default_factory=lambda: [np.zeros(0, np.int32)])
    values: list[FloatArray] = field(default_factory=lambda: [np.zeros(0, np.float32)])

    def add(self, row: int, ids: IntArray, values: FloatArray) -> None:
        self.rows.append(np.full(ids.size, row, np.int32))
        self.ids.append(ids)
        self.values.append(values)

    def entries(self) -> Entries:
        lists: tuple[list[Any], ...] = (self.rows, self.ids, self.values)
        return Entries(*(np.concatenate(parts) for parts in lists))


class DeviceSlots:
    """Page tables, last sampled tokens, sampling parameters, and output counts for penalties."""

    def __init__(self, sizes: ProgramSizes, vocab_size: int, device: torch.device) -> None:
        rows = sizes.num_slots + 1
        pages = -(-sizes.max_context_len // sizes.kv.page_size)
        self.padding_slot = sizes.num_slots
        self.page_tables = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.floats = torch.zeros((rows, PARAMETERS), dtype=torch.float32, device=device)
        self.ints = torch.zeros((rows, PARAMETERS), dtype=torch.int32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        # [lanes, vocabulary]: only sequences with penalties have a lane.
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    @property
    def max_pages(self) -> int:
        """Pages of a slot."""
        return self.page_tables.shape[1]

    def apply(self, staged: dict[str, torch.Tensor]) -> None:
        """Take over what a plan opens and which pages it hands out.

        Args:
            staged: of `update_arrays`.
        """
        if "opened_slots" in staged:
            slots = staged["opened_slots"]
            self.floats.index_copy_(0, slots, staged["opened_float"])
            self.ints.index_copy_(0, slots, staged["opened_int"])
            self.seeds.index_copy_(0, slots, staged["opened_seed"])
        if "fresh_lanes" in staged:
            self.counts.index_fill_(0, staged["fresh_lanes"], 0)
        if "output_cells" in staged:
            # Each cell comes once: the host has counted.
            self.counts.view(-1).index_copy_(0, staged["output_cells"], staged["output_counts"])
        if "written_cells" in staged:
            self.page_tables.view(-1).index_copy_(0, staged["written_cells"], staged["pages"])

    def reserve_lanes(self, num_lanes: int) -> None:
        """Make room for the counts of so many sequences."""
        have, vocabulary = self.counts.shape
        if num_lanes > have:
            grown = self.counts.new_zeros((max(num_lanes, 2 * have, 4), vocabulary))
            grown[:have] = self.counts
            self.counts = grown

    def update_arrays(self, plan: Plan, lanes: IntArray) -> dict[str, Array]:
        """What `apply` needs of a plan, and only that: most steps open nothing.

        Args:
            plan: the step.
            lanes: of the opened slots, -1: none.
        """
        arrays: dict[str, Array] = {}
        if plan.opened_slots.size:
            arrays |= {
                "opened_slots": plan.opened_slots.astype(np.int64),
                "opened_float": plan.opened_float,
                "opened_int": plan.opened_int,
                "opened_seed": plan.opened_seed,
            }
            fresh = lanes[lanes >= 0]
            if fresh.size:
                arrays["fresh_lanes"] = fresh.astype(np.int64)
                arrays |= self._known_outputs(plan, lanes)
        if plan.page_writes.size:
            cells = plan.page_writes[:, 1].astype(np.int64) * self.max_pages
            arrays["written_cells"] = cells + plan.page_writes[:, 2]
            arrays["pages"] = plan.page_writes[:, 3]
        return arrays

    def _known_outputs(self, plan: Plan, lanes: IntArray) -> dict[str, Array]:
        owner = np.repeat(lanes, np.diff(plan.output_offsets)).astype(np.int64)
        counted = owner >= 0
        if not counted.any():
            return {}
        cells = owner[counted] * self.counts.shape[1] + plan.output_ids[counted]
        unique, counts = np.unique(cells, return_counts=True)
        return {"output_cells": unique, "output_counts": counts.astype(np.int32)}
