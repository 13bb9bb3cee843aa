"""Masks for the steps of sequences that have a grammar, and what their tokens mean for it.

`MaskSource` fills the masks of a step, and takes the step's tokens before the loop commits them;
`constrained_runner.py` says when. Matchers live as long as a slot is open; a sequence that comes
back after a retraction brings its outputs, and its matcher is built again from them; one that only
starts anew in its slot, because it went on differently than planned, goes on with its matcher.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from trunkline.engine.grammar.backend import Backend, Masks, Matcher, Vocabulary
from trunkline.engine.grammar.constraints import Constraint
from trunkline.engine.grammar.effort import Effort, Shared
from trunkline.plan import (
    FLAG_GRAMMAR,
    FREQUENCY_PENALTY,
    GRAMMAR_REQUEST,
    MIN_GRAMMAR_TOKENS,
    OPEN_FLAGS,
    PRESENCE_PENALTY,
    PROMPT_LEN,
    REPETITION_PENALTY,
    ROW_GRAMMAR_TOO_SLOW,
    ROW_GRAMMAR_VIOLATED,
    ROW_OK,
    SAMPLE_LOGPROB,
    Plan,
    decode_result,
    encode_result,
)

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]

MAX_FORCED: Final = 64  # tokens in a row that follow one that was sampled
NARROW_IDS: Final = 64


class Requests(Protocol):
    """What is needed of `Constraints`."""

    def of(self, request: int) -> Constraint: ...
    def ended(self, requests: Sequence[int]) -> None: ...


@dataclass(slots=True)
class ConstrainedSequence:
    """Where the sequence in a slot is in its grammar."""

    request: int
    matcher: Matcher
    prompt_len: int
    min_tokens: int  # outputs before which the suppressed ids are held back, where others are left
    suppressed: IntArray
    may_jump: bool  # forced tokens need no draw: nothing but the mask depends on them
    recent: deque[int]  # the last outputs, while the constraint has not begun
    effort: Effort  # of its request
    starts_after: tuple[int, ...] = ()
    outputs: list[int] = field(default_factory=list)
    started: bool = True
    violated: bool = False
    has_ended: bool = False  # its grammar has: nothing can follow
    is_watched: bool = False  # its calls are timed, alone: it was in one that was slow
    is_narrow: bool = False  # its last mask allowed few ids: the next may allow a single one

    def begins_at(self, token_id: int) -> bool:
        """Whether the constraint begins after this output, the next before it began."""
        self.recent.append(token_id)
        return tuple(self.recent) == self.starts_after

    @property
    def next_position(self) -> int:
        """Where the token after its outputs is."""
        return self.prompt_len + len(self.outputs)

    @property
    def row_error(self) -> int:
        """Why its row fails."""
        return ROW_GRAMMAR_TOO_SLOW if self.effort.is_exhausted else ROW_GRAMMAR_VIOLATED


Sample = tuple[int, ConstrainedSequence]  # an entry of a plan, and whose it is


class MaskSource:
    """The matchers of the open slots."""

    def __init__(
        self,
        backend: Backend,
        requests: Requests,
        vocabulary: Vocabulary,
        *,
        jump_forward: bool = True,
    ) -> None:
        """`jump_forward`: tokens that are certain follow at once, without a step of their own."""
        self._backend = backend
        self._requests = requests
        self._jump_forward = jump_forward
        self._words = -(-len(vocabulary.tokens) // 32)
        self._slots: dict[int, ConstrainedSequence] = {}
        self._free = np.full(self._words, -1, np.int32)  # before the constraint begins
        _forbid(self._free, np.asarray(vocabulary.end_ids, np.int32))
        self._end_ids = frozenset(vocabulary.end_ids)
        self._spare: list[Masks] = []

    def update(self, plan: Plan) -> None:
        """Close and open slots as the plan says."""
        closed = plan.closed_slots.tolist()
        left = {slot: self._slots.pop(slot) for slot in closed if slot in self._slots}
        flags = plan.opened_int[:, OPEN_FLAGS] & FLAG_GRAMMAR
        for index, slot in enumerate(plan.opened_slots.tolist()):
            self._slots.pop(slot, None)
            if flags[index]:
                self._slots[slot] = self._opened(plan, index, left.get(slot))
        ended = [one.request for slot, one in left.items() if self._slots.get(slot) is not one]
        if ended:
            self._requests.ended(ended)

    def samples(self, plan: Plan) -> list[Sample]:
        """The plan's sample entries that have a grammar, with their sequences."""
        if not self._slots:
            return []
        slots = enumerate(plan.sample_slot.tolist())
        return [(entry, self._slots[slot]) for entry, slot in slots if slot in self._slots]

    def knows(self, plan: Plan, samples: list[Sample]) -> bool:
        """Whether all outputs before these samples were accepted: their masks can be filled."""
        return len(_live(plan, samples)) == len(samples)

    def fill(self, plan: Plan, samples: list[Sample]) -> Masks:
        """Masks for the plan's samples, to be given to `recycle`; see `Runner.sample`.

        Where a sequence went on differently than it was planned, or not at all, its sample is void,
        and its mask allows everything.
        """
        num_samples = plan.sample_slot.size
        buffer = self._spare.pop() if self._spare else np.zeros((0, self._words), np.int32)
        if len(buffer) < num_samples:
            buffer = np.zeros((num_samples, self._words), np.int32)
        live = _live(plan, samples)
        if len(live) < len(samples):
            buffer[[entry for entry, _ in samples]] = -1
        self._fill(buffer, live)
        return buffer[:num_samples]

    def recycle(self, masks: Masks) -> None:
        """Take masks back that nothing reads any more."""
        self._spare.append(masks if masks.base is None else masks.base)

    def accept(self, plan: Plan, samples: list[Sample], result: Bytes) -> Bytes:
        """Take the tokens that a step has led to; those of void samples are ignored.

        Returns:
            The result, with an error for each row that left its grammar or takes too long to
            match, and with the tokens that are certain to follow.
        """
        sections = decode_result(result)
        counts, tokens = sections["sample_counts"], sections["token_ids"]
        firsts = np.cumsum(counts) - counts
        errors = sections["row_errors"]
        row_of = _sample_rows(plan)
        taken = [
            (entry, sequence, int(tokens[firsts[entry]]))
            for entry, sequence in _live(plan, samples)
            if counts[entry] and not (errors.size and errors[row_of[entry]])
        ]
        self._take([(sequence, token) for _, sequence, token in taken])
        violated = [
            (entry, sequence.row_error) for entry, sequence, _ in taken if sequence.violated
        ]
        forced = {
            entry: self._forced(sequence)
            for entry, sequence, token in taken
            if self._may_jump(plan, entry, sequence)
        }
        forced = {entry: ids for entry, ids in forced.items() if ids}
        if not violated and not forced:
            return result
        if violated:
            errors = errors.copy() if errors.size else np.full(plan.row_slot.size, ROW_OK, np.int32)
            for entry, error in violated:
                errors[row_of[entry]] = error
            sections["row_errors"] = errors
        if forced:
            _insert(sections, firsts + counts, forced)
        return encode_result(plan.step, sections)

    def _opened(
        self, plan: Plan, index: int, left: ConstrainedSequence | None
    ) -> ConstrainedSequence:
        """The sequence that enters a slot; `left` is the one that has just left it."""
        ints, floats = plan.opened_int[index], plan.opened_float[index]
        request = int(ints[GRAMMAR_REQUEST].view(np.int64)[0])
        outputs = plan.output_ids[slice(*plan.output_offsets[index : index + 2].tolist())].tolist()
        if left is not None and left.request == request and left.outputs == outputs:
            return left
        constraint = self._requests.of(request)
        after = constraint.starts_after
        suppressed = slice(*plan.suppressed_offsets[index : index + 2].tolist())
        additive = floats[FREQUENCY_PENALTY] != 0 or floats[PRESENCE_PENALTY] != 0
        sequence = ConstrainedSequence(
            request=request,
            matcher=self._backend.matcher(constraint.compiled),
            prompt_len=int(ints[PROMPT_LEN]),
            min_tokens=int(ints[MIN_GRAMMAR_TOKENS]),
            suppressed=plan.suppressed_ids[suppressed].copy(),
            # The runner counts the tokens that it draws for the penalties, and no others.
            may_jump=bool(self._jump_forward and not additive and floats[REPETITION_PENALTY] == 1),
            recent=deque(maxlen=max(len(after), 1)),
            effort=self._effort(request),
            starts_after=after,
            started=not after,
        )
        for token in outputs:
            self._take_one(sequence, token)
        return sequence

    def _effort(self, request: int) -> Effort:
        """What the request's samples share."""
        known = (one.effort for one in self._slots.values() if one.request == request)
        return next(known, None) or Effort()

    def _take_one(self, sequence: ConstrainedSequence, token_id: int) -> None:
        if self._goes_on(sequence, token_id):
            self._accept_alone(sequence, token_id)

    def _accept_alone(self, sequence: ConstrainedSequence, token_id: int) -> None:
        with sequence.effort.charged():
            fine = sequence.matcher.accept(token_id)
        sequence.violated = not fine or sequence.effort.is_exhausted

    def _goes_on(self, sequence: ConstrainedSequence, token_id: int) -> bool:
        """Count an output; whether it is one for the matcher."""
        sequence.outputs.append(token_id)
        sequence.effort.add_token()
        if sequence.violated:
            return False
        if not sequence.started:
            sequence.started = sequence.begins_at(token_id)
            return False
        sequence.has_ended = token_id in self._end_ids
        return True

    def _take(self, outputs: list[tuple[ConstrainedSequence, int]]) -> None:
        """Take one output of each sequence."""
        matched = [(one, token) for one, token in outputs if self._goes_on(one, token)]
        together = [(one, token) for one, token in matched if not one.is_watched]
        for one, token in matched:
            if one.is_watched:
                self._accept_alone(one, token)
        if not together:
            return
        shared = Shared()
        accepted = self._backend.accept(
            [one.matcher for one, _ in together], [token for _, token in together]
        )
        is_slow = shared.was_slow(len(together))
        for (one, _), fine in zip(together, accepted, strict=True):
            one.violated = not fine
            one.is_watched = is_slow

    def _fill(self, masks: Masks, samples: list[Sample]) -> None:
        """Write the mask of each sample into its row."""
        constrained = []
        for entry, sequence in samples:
            if sequence.violated:
                masks[entry] = -1  # its row fails, whatever is drawn
            elif sequence.started:
                constrained.append((entry, sequence))
            else:
                masks[entry] = self._free
        self._fill_together(
            masks, [(entry, one) for entry, one in constrained if not one.is_watched]
        )
        for entry, sequence in constrained:
            if sequence.is_watched:
                self._fill_alone(masks, entry, sequence)
            self._adjust(masks[entry], sequence)

    def _fill_together(self, masks: Masks, samples: list[Sample]) -> None:
        """Write these masks at once; if that fails or is slow, they are watched from now on."""
        if not samples:
            return
        shared = Shared()
        try:
            self._backend.fill(
                [one.matcher for _, one in samples], masks, [entry for entry, _ in samples]
            )
            is_fine = not shared.was_slow(len(samples))
        except Exception:  # of one of them: the next call for it alone tells which
            is_fine = False
        for _, sequence in samples:
            sequence.is_watched = not is_fine

    def _fill_alone(self, masks: Masks, entry: int, sequence: ConstrainedSequence) -> None:
        try:
            with sequence.effort.charged():
                self._backend.fill([sequence.matcher], masks, [entry])
        except Exception:  # its row ends with an error
            logger.exception("A grammar gives no mask; its sequence ends with an error")
            masks[entry] = 0
        sequence.violated = sequence.effort.is_exhausted

    def _adjust(self, mask: IntArray, sequence: ConstrainedSequence) -> None:
        """Hold the suppressed ids back where that leaves others; see to dead ends."""
        if len(sequence.outputs) < sequence.min_tokens and sequence.suppressed.size:
            kept = mask.copy()
            _forbid(kept, sequence.suppressed)
            if kept.any():
                mask[:] = kept
        allowed = int(np.unpackbits(mask.view(np.uint8)).sum(dtype=np.int64))
        sequence.is_narrow = allowed <= NARROW_IDS
        if allowed == 0:
            sequence.violated = True
            mask[:] = -1

    def _may_jump(self, plan: Plan, entry: int, sequence: ConstrainedSequence) -> bool:
        if not sequence.may_jump or sequence.violated or not sequence.started:
            return False
        if sequence.has_ended:
            return False
        logit = int(plan.sample_logit[entry])
        scores = plan.score_offsets[logit] != plan.score_offsets[logit + 1]
        wants = plan.sample_flags[entry] & SAMPLE_LOGPROB or plan.logit_top_n[logit] or scores
        return not wants

    def _forced(self, sequence: ConstrainedSequence) -> list[int]:
        """The ids that the masks of the next steps would leave no choice about, taken."""
        forced: list[int] = []
        mask = np.zeros((1, self._words), np.int32)
        while len(forced) < MAX_FORCED and (sequence.is_narrow or sequence.matcher.may_end()):
            self._fill(mask, [(0, sequence)])
            only = _only_id(mask[0])
            if only is None or sequence.violated:
                break
            forced.append(only)
            self._take_one(sequence, only)
            if only in self._end_ids:
                break
        return forced


def _forbid(mask: IntArray, ids: IntArray) -> None:
    """Clear the bits of some ids."""
    np.bitwise_and.at(mask, ids >> 5, ~(np.int32(1) << (ids & 31)))


def _only_id(mask: IntArray) -> int | None:
    """The id that a mask allows, if it is a single one."""
    words = np.flatnonzero(mask)
    if words.size != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


def _live(plan: Plan, samples: list[Sample]) -> list[Sample]:
    """Samples that are drawn where their sequence is now."""
    positions = plan.sample_position
    return [
        (entry, sequence)
        for entry, sequence in samples
        if positions[entry] == sequence.next_position and not sequence.has_ended
    ]


def _sample_rows(plan: Plan) -> npt.NDArray[np.int64]:
    """The row of every sample entry."""
    ends = np.cumsum(plan.row_query_len)
    return np.searchsorted(ends, plan.logit_tokens[plan.sample_logit], side="right")


def _insert(
    sections: dict[str, npt.NDArray[Any]],
    ends: npt.NDArray[np.int64],
    forced: dict[int, list[int]],
) -> None:
    """Put forced tokens behind the tokens of their sample entries, which end at `ends`."""
    counts = sections["sample_counts"].copy()
    at = np.repeat([ends[entry] for entry in forced], [len(ids) for ids in forced.values()])
    ids = [token for one in forced.values() for token in one]
    sections["token_ids"] = np.insert(sections["token_ids"], at, ids)
    if sections["sampled_logprobs"].size:  # of other samples: these have none
        sections["sampled_logprobs"] = np.insert(sections["sampled_logprobs"], at, 0.0)
    for entry, one in forced.items():
        counts[entry] += len(one)
    sections["sample_counts"] = counts
