"""A device that computes late: what is launched runs at any time until it is waited for.

Its KV is real: a token's logits are a hash of all that the pages of its row hold, so that a page
that was freed, copied or overwritten at the wrong time changes what is drawn. So does an arena or a
mask that is written before the device has read it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trunkline.plan import (
    FLAG_GRAMMAR,
    FREQUENCY_PENALTY,
    LOGIT_POOLED,
    MIN_NEW_TOKENS,
    OPEN_FLAGS,
    PROMPT_LEN,
    ROW_FAILED,
    ROW_NOT_FINITE,
    SAMPLE_LOGPROB,
    SOURCE_LAST_SAMPLED,
    TEMPERATURE,
    Plan,
    encode_result,
)

Words = np.ndarray  # uint64
A, B, C = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(values: Words) -> Words:
    """A hash of each value."""
    z = values + A
    z = (z ^ (z >> np.uint64(30))) * B
    z = (z ^ (z >> np.uint64(27))) * C
    return z ^ (z >> np.uint64(31))


def unit(values: Words) -> np.ndarray:
    """Floats in 0..1 of hashes."""
    return (values >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def check_is_there(plan: Plan) -> None:
    """No other plan has been written over this one."""
    assert int(plan.arena[16:24].view(np.int64)[0]) == plan.step


@dataclass(frozen=True)
class Faults:
    """How often something goes wrong; rows by (seed, position), steps at random."""

    row_error: float = 0.0
    disobeys: float = 0.0  # draws what the mask forbids
    forward: float = 0.0
    sample: float = 0.0
    wait: float = 0.0


@dataclass
class Slot:
    """What a device keeps of an open slot."""

    prompt_len: int
    min_new_tokens: int
    temperature: float
    frequency: float
    seed: int
    has_grammar: bool
    suppressed: np.ndarray
    counts: np.ndarray


class Accident(Exception):
    """What a device raises at random."""


@dataclass
class Pending:
    """A step; see `PendingResult`."""

    device: Device
    plan: Plan
    error: Exception | None = None
    block: np.ndarray | None = None
    is_done: bool = False
    was_waited_for: bool = False

    def wait(self) -> np.ndarray:
        assert not self.was_waited_for
        self.was_waited_for = True
        while not self.is_done:
            self.device.run_one()
        if self.error is not None:
            raise self.error
        assert self.block is not None
        return self.block


@dataclass
class Device:
    """See `loop.Executor`; `lazy` is how likely it is to put work off."""

    vocab_size: int
    page_size: int
    num_pages: int
    num_slots: int
    max_context_len: int
    seed: int = 0
    lazy: float = 0.7
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pool = mix(np.arange(self.num_pages * self.page_size, dtype=np.uint64))
        self.pool = self.pool.reshape(self.num_pages, self.page_size)
        pages = -(-self.max_context_len // self.page_size)
        self.tables = np.zeros((self.num_slots, pages), np.int32)
        self.last = np.zeros(self.num_slots, np.int32)
        self.slots: dict[int, Slot] = {}
        self.queue: deque[Callable[[], None]] = deque()
        self.logits = np.zeros((0, self.vocab_size), np.float32)
        self.between: Pending | None = None  # forward and sample

    def happens(self, likelihood: float) -> bool:
        return self.random.random() < likelihood

    def forward(self, plan: Plan) -> None:
        assert self.between is None, "the step before was not sampled"
        if self.happens(self.faults.forward):
            raise Accident("out of memory")
        step = self.between = Pending(self, plan)
        self.launch(lambda: self.compute(step))

    def awaits_earlier(self, plan: Plan) -> bool:
        return False

    def sample(self, plan: Plan, masks: Any = None) -> Pending:
        step, self.between = self.between, None
        assert step is not None
        assert step.plan is plan
        if self.happens(self.faults.sample):
            while self.queue:  # nothing reads the plan any more when the step has failed
                self.run_one()
            raise Accident("out of memory")
        self.launch(lambda: self.draw(step, masks))
        return step

    def launch(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        while self.queue and self.random.random() >= self.lazy:
            self.run_one()

    def run_one(self) -> None:
        self.queue.popleft()()

    def compute(self, step: Pending) -> None:
        try:
            self.compute_plan(step.plan)
        except Exception as error:
            step.error = error

    def compute_plan(self, plan: Plan) -> None:
        check_is_there(plan)
        for slot in plan.closed_slots.tolist():
            self.slots.pop(slot, None)
        for index, slot in enumerate(plan.opened_slots.tolist()):
            self.slots[slot] = self.opened(plan, index)
        for _, slot, index, page in plan.page_writes.tolist():
            self.tables[slot, index] = page
        for _, source, _, destination, count, _ in plan.page_moves.tolist():
            self.pool[destination, :count] = self.pool[source, :count]
        contexts = np.zeros(plan.token_ids.size, np.uint64)
        first = 0
        for row, slot in enumerate(plan.row_slot.tolist()):
            count, start = int(plan.row_query_len[row]), int(plan.row_computed_len[row])
            tokens = plan.token_ids[first : first + count].copy()
            if plan.row_token_source[row] == SOURCE_LAST_SAMPLED:
                tokens[-1] = self.last[slot]
            positions = plan.positions[first : first + count]
            assert positions.tolist() == list(range(start, start + count))
            pages = self.tables[slot, positions // self.page_size]
            assert pages.all(), "a token has no page"
            kv = mix(tokens.astype(np.uint64) * A + positions.astype(np.uint64) * B)
            self.pool[pages, positions % self.page_size] = kv
            table = self.tables[slot, : -(-(start + count) // self.page_size)]
            held = self.pool[table].reshape(-1)[: start + count]
            seen = np.cumsum(mix(held + np.arange(start + count, dtype=np.uint64) * C))
            contexts[first : first + count] = seen[start:]
            first += count
        at = contexts[plan.logit_tokens][:, None]
        self.logits = unit(mix(at + np.arange(self.vocab_size, dtype=np.uint64)[None] * A))
        self.pooled = at[(plan.logit_flags & LOGIT_POOLED) != 0, 0]

    def opened(self, plan: Plan, index: int) -> Slot:
        ints, floats = plan.opened_int[index], plan.opened_float[index]
        suppressed = slice(*plan.suppressed_offsets[index : index + 2].tolist())
        outputs = slice(*plan.output_offsets[index : index + 2].tolist())
        return Slot(
            prompt_len=int(ints[PROMPT_LEN]),
            min_new_tokens=int(ints[MIN_NEW_TOKENS]),
            temperature=float(floats[TEMPERATURE]),
            frequency=float(floats[FREQUENCY_PENALTY]),
            seed=int(plan.opened_seed[index]),
            has_grammar=bool(ints[OPEN_FLAGS] & FLAG_GRAMMAR),
            suppressed=plan.suppressed_ids[suppressed].copy(),
            counts=np.bincount(plan.output_ids[outputs], minlength=self.vocab_size),
        )

    def draw(self, step: Pending, masks: Any) -> None:
        step.is_done = True
        if step.error is None:
            step.block = self.draw_plan(step.plan, masks)
            if self.happens(self.faults.wait):
                step.error = Accident("the step is lost")

    def draw_plan(self, plan: Plan, masks: Any) -> np.ndarray:
        check_is_there(plan)
        ids = np.zeros(plan.sample_slot.size, np.int32)
        errors = np.zeros(plan.row_slot.size, np.int32)
        ends = np.cumsum(plan.row_query_len)
        rows = np.searchsorted(ends, plan.logit_tokens[plan.sample_logit], side="right")
        for entry, slot in enumerate(plan.sample_slot.tolist()):
            mask = masks[entry] if self.slots[slot].has_grammar else None
            ids[entry], error = self.draw_one(plan, entry, self.slots[slot], mask)
            errors[rows[entry]] = error
            self.last[slot] = ids[entry]
            self.slots[slot].counts[ids[entry]] += 1
        asked = (plan.sample_flags & SAMPLE_LOGPROB).any()
        order = np.argsort(-self.logits, axis=1, kind="stable")
        top = [order[at, :count] for at, count in enumerate(plan.logit_top_n.tolist())]
        at = np.repeat(np.arange(plan.logit_top_n.size), plan.logit_top_n)
        scored = np.repeat(np.arange(plan.logit_tokens.size), np.diff(plan.score_offsets))
        top_ids = np.concatenate(top) if top else np.zeros(0, np.int32)
        return encode_result(
            plan.step,
            {
                "sample_counts": np.ones(ids.size, np.int32),
                "token_ids": ids,
                "row_errors": errors if errors.any() else np.zeros(0, np.int32),
                "sampled_logprobs": self.logits[plan.sample_logit, ids]
                if asked
                else np.zeros(0, np.float32),
                "score_logprobs": self.logits[scored, plan.score_ids],
                "top_ids": top_ids,
                "top_logprobs": self.logits[at, top_ids],
                "pooled_states": unit(self.pooled),
            },
        )

    def draw_one(self, plan: Plan, entry: int, slot: Slot, mask: Any) -> tuple[int, int]:
        position = int(plan.sample_position[entry])
        values = self.logits[plan.sample_logit[entry]].astype(np.float64)
        at = np.array([slot.seed & (2**64 - 1), position], np.uint64)
        key = mix(at[:1] + at[1:] * B)
        if slot.temperature > 0:
            noise = unit(mix(key + np.arange(self.vocab_size, dtype=np.uint64) * C))
            values = values / slot.temperature + noise
        values -= slot.frequency * slot.counts
        if position - slot.prompt_len < slot.min_new_tokens:
            values[slot.suppressed] = -np.inf
        luck = unit(mix(key + A))[0]
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
            if bits.sum() == 1:  # it may be forced, and then nothing is drawn
                luck = 0.5
            if luck >= self.faults.disobeys:
                values[bits == 0] = -np.inf
        if luck > 1 - self.faults.row_error:
            return 0, ROW_NOT_FINITE
        chosen = int(values.argmax())
        return chosen, ROW_FAILED if values[chosen] == -np.inf else 0
