"""Per-slot sampling state: opened and closed by the plan, read at every draw.

It turns the plan's sample entries into the arrays that a backend's `sample` takes. It knows no
logits and no devices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trunkline.kernels import SampleInputs
from trunkline.plan import (
    FLAG_GRAMMAR,
    FLAG_PROCESSED,
    FREQUENCY_PENALTY,
    MIN_NEW_TOKENS,
    MIN_P,
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

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class SlotSampling:
    """Everything about one sequence that its draws depend on, besides its logits."""

    floats: FloatArray  # as `opened_float`
    ints: IntArray  # as `opened_int`
    seed: int
    bias_ids: IntArray
    bias_values: FloatArray
    suppressed_ids: IntArray
    is_penalised: bool  # output ids must be counted
    uses_grammar: bool  # every draw needs a mask
    counts: Counter[int] = field(default_factory=Counter)  # output ids; empty without penalties

    def suppresses(self, position: int) -> bool:
        """Whether a token drawn at this position comes before `min_new_tokens` are out."""
        return position - int(self.ints[PROMPT_LEN]) < int(self.ints[MIN_NEW_TOKENS])


class SamplingState:
    """The slots' sampling states."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._slots: dict[int, SlotSampling] = {}

    def update(self, plan: Plan) -> None:
        """Close and open slots as the plan says.

        Raises:
            ValueError: an id lies outside the vocabulary; nothing has changed then.
        """
        for name in ("bias_ids", "suppressed_ids", "output_ids", "score_ids"):
            ids: IntArray = getattr(plan, name)
            if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
                raise ValueError(
                    f"{name} of the plan holds ids from {ids.min()} to {ids.max()}, the vocabulary "
                    f"has {self._vocab_size}; requests are to be refused before"
                )
        opened = {
            int(slot): _opened_slot(plan, index) for index, slot in enumerate(plan.opened_slots)
        }
        for slot in plan.closed_slots.tolist():
            self._slots.pop(slot, None)
        self._slots.update(opened)

    def count(self, slots: IntArray, token_ids: IntArray) -> None:
        """Note the tokens that were just drawn."""
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            state = self._slots[slot]
            if state.is_penalised:
                state.counts[token] += 1

    def inputs(self, plan: Plan, masks: IntArray | None) -> SampleInputs:
        """What the backend needs to draw the plan's samples.

        Args:
            plan: the step, whose slots are open.
            masks: `[samples, ceil(vocabulary / 32)]` grammar masks; only the rows of samples whose
                slot has a grammar are read.

        Raises:
            ValueError: a sample's slot is not open, or it needs a mask that is not there.
        """
        closed = sorted({slot for slot in plan.sample_slot.tolist() if slot not in self._slots})
        if closed:
            raise ValueError(f"the plan samples for slots {closed}, which are not open")
        states = [self._slots[slot] for slot in plan.sample_slot.tolist()]
        floats = _stack([state.floats for state in states], np.float32)
        ints = _stack([state.ints for state in states], np.int32)
        sparse = _SparseLists()
        for row, (state, position) in enumerate(
            zip(states, plan.sample_position.tolist(), strict=True)
        ):
            sparse.add(row, state, position)
        mask_rows = np.array([r for r, s in enumerate(states) if s.uses_grammar], np.int32)
        if mask_rows.size and (masks is None or masks.shape[0] != len(states)):
            raise ValueError(f"samples {mask_rows.tolist()} have a grammar and need a mask each")
        return SampleInputs(
            logit_index=plan.sample_logit,
            temperature=floats[:, TEMPERATURE],
            top_p=floats[:, TOP_P],
            min_p=floats[:, MIN_P],
            top_k=ints[:, TOP_K],
            seed=np.array([state.seed for state in states], np.int64),
            position=plan.sample_position,
            frequency_penalty=floats[:, FREQUENCY_PENALTY],
            presence_penalty=floats[:, PRESENCE_PENALTY],
            repetition_penalty=floats[:, REPETITION_PENALTY],
            counted_rows=sparse.counted.rows(),
            counted_ids=sparse.counted.ids(),
            counts=sparse.counted.values(),
            suppressed_rows=sparse.suppressed.rows(),
            suppressed_ids=sparse.suppressed.ids(),
            bias_rows=sparse.bias.rows(),
            bias_ids=sparse.bias.ids(),
            bias_values=sparse.bias.values(),
            masks=masks[mask_rows] if masks is not None and mask_rows.size else None,
            mask_rows=mask_rows,
            processed_rows=np.array(
                [r for r, s in enumerate(states) if s.ints[OPEN_FLAGS] & FLAG_PROCESSED], np.int32
            ),
            logprob_rows=np.flatnonzero(plan.sample_flags & SAMPLE_LOGPROB).astype(np.int32),
            top_n=plan.logit_top_n,
            score_offsets=plan.score_offsets,
            score_ids=plan.score_ids,
        )


class _SparseList:
    """Entries `(row, id, value)`, gathered row by row."""

    def __init__(self) -> None:
        self._rows: list[IntArray] = [np.zeros(0, np.int32)]
        self._ids: list[IntArray] = [np.zeros(0, np.int32)]
        self._values: list[FloatArray] = [np.zeros(0, np.float32)]

    def add(self, row: int, ids: IntArray, values: FloatArray) -> None:
        self._rows.append(np.full(ids.size, row, np.int32))
        self._ids.append(ids)
        self._values.append(values)

    def rows(self) -> IntArray:
        return np.concatenate(self._rows)

    def ids(self) -> IntArray:
        return np.concatenate(self._ids)

    def values(self) -> FloatArray:
        return np.concatenate(self._values)


class _SparseLists:
    def __init__(self) -> None:
        self.counted = _SparseList()
        self.suppressed = _SparseList()
        self.bias = _SparseList()

    def add(self, row: int, state: SlotSampling, position: int) -> None:
        if state.counts:
            ids = np.fromiter(state.counts.keys(), np.int32, len(state.counts))
            counts = np.fromiter(state.counts.values(), np.float32, len(state.counts))
            self.counted.add(row, ids, counts)
        if state.suppressed_ids.size and state.suppresses(position):
            nothing = np.zeros(state.suppressed_ids.size, np.float32)
            self.suppressed.add(row, state.suppressed_ids, nothing)
        if state.bias_ids.size:
            self.bias.add(row, state.bias_ids, state.bias_values)


def _opened_slot(plan: Plan, index: int) -> SlotSampling:
    """Copy an opened record: the plan's arena is written again in the next step."""

    def between(offsets: IntArray) -> slice:
        return slice(int(offsets[index]), int(offsets[index + 1]))

    bias = between(plan.bias_offsets)
    floats, ints = plan.opened_float[index].copy(), plan.opened_int[index].copy()
    additive = floats[FREQUENCY_PENALTY] != 0 or floats[PRESENCE_PENALTY] != 0
    state = SlotSampling(
        floats=floats,
        ints=ints,
        seed=int(plan.opened_seed[index]),
        bias_ids=plan.bias_ids[bias].copy(),
        bias_values=plan.bias_values[bias].copy(),
        suppressed_ids=plan.suppressed_ids[between(plan.suppressed_offsets)].copy(),
        is_penalised=bool(additive or floats[REPETITION_PENALTY] != 1),
        uses_grammar=bool(ints[OPEN_FLAGS] & FLAG_GRAMMAR),
    )
    if state.is_penalised:
        state.counts.update(plan.output_ids[between(plan.output_offsets)].tolist())
    return state


def _stack(rows: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.stack(rows) if rows else np.zeros((0, 8), dtype)
