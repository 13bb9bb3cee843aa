"""Masks and tokens of single steps, with a backend of a few words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.kernels.plan_builder import Opened, Params, build_plan, opened_sections

from trunkline.engine.grammar import effort
from trunkline.engine.grammar.backend import Masks, Vocabulary
from trunkline.engine.grammar.constrained_runner import ConstrainedRunner
from trunkline.engine.grammar.constraints import Constraint
from trunkline.engine.grammar.masks import MaskSource
from trunkline.kernels import Finished
from trunkline.plan import (
    MIN_GRAMMAR_TOKENS,
    ROW_GRAMMAR_TOO_SLOW,
    Plan,
    decode_result,
    encode_result,
)

END = 0
VOCABULARY = Vocabulary(tokens=["", *"abcdefg"], special_ids={}, end_ids=[END], tokenizer_json="")


@dataclass(frozen=True)
class Words:
    """A grammar of one text; `None` in it fails when it is reached."""

    ids: tuple[int | None, ...]
    num_bytes: int = 1


class WordMatcher:
    def __init__(self, words: Words) -> None:
        self.left = [*words.ids, END]

    def allowed(self) -> int | None:
        return self.left[0]

    def accept(self, token_id: int) -> bool:
        return self.left.pop(0) == token_id

    def may_end(self) -> bool:
        return self.left == [END]


class WordBackend:
    def compile(self, spec: Any) -> bytes:
        raise NotImplementedError

    def load(self, data: bytes) -> Words:
        raise NotImplementedError

    def matcher(self, compiled: Words) -> WordMatcher:
        return WordMatcher(compiled)

    def accept(self, matchers: Sequence[WordMatcher], token_ids: Sequence[int]) -> list[bool]:
        return [one.accept(token) for one, token in zip(matchers, token_ids, strict=True)]

    def fill(self, matchers: Sequence[WordMatcher], masks: Masks, rows: Sequence[int]) -> None:
        for matcher, row in zip(matchers, rows, strict=True):
            allowed = matcher.allowed()
            if allowed is None:
                raise RuntimeError("it is broken")
            masks[row] = 1 << allowed


@dataclass
class Requests:
    grammars: dict[int, Constraint]

    def of(self, request: int) -> Constraint:
        return self.grammars[request]

    def ended(self, requests: Sequence[int]) -> None:
        for request in requests:
            del self.grammars[request]


class ScriptedRunner:
    """Draws what it is told to, whatever the masks say, and keeps the masks."""

    def __init__(self, *steps: list[int]) -> None:
        self.steps = list(steps)
        self.masks: list[Any] = []

    def forward(self, plan: Plan) -> None:
        pass

    def sample(self, plan: Plan, masks: Masks | None = None) -> Any:
        self.masks.append(None if masks is None else masks.copy())
        ids = self.steps.pop(0)
        counts = np.ones(len(ids), np.int32)
        sections = {"sample_counts": counts, "token_ids": np.array(ids)}
        return Finished(encode_result(plan.step, sections))

    def awaits_earlier(self, plan: Plan) -> bool:
        return False


def step(
    number: int,
    opened: Sequence[tuple[int, int]],
    slots: int,
    outputs: Sequence[int] = (),
    closed: Sequence[int] = (),
) -> Plan:
    """A step of one token for each of `slots` slots; `opened`: slots with their requests."""
    sections = opened_sections(
        [Opened(slot, 1, Params(grammar=True), output_ids=list(outputs)) for slot, _ in opened]
    )
    for row, (_, request) in zip(sections["opened_int"], opened, strict=True):
        row[MIN_GRAMMAR_TOKENS + 1] = request
    rows = np.arange(slots)
    return build_plan(
        number,
        {
            **sections,
            "closed_slots": closed,
            "row_slot": rows,
            "row_query_len": np.ones(slots),
            "row_computed_len": np.full(slots, number),
            "row_token_source": np.zeros(slots),
            "token_ids": np.ones(slots),
            "positions": np.full(slots, number),
            "logit_tokens": rows,
            "logit_top_n": np.zeros(slots),
            "logit_flags": np.zeros(slots),
            "score_offsets": np.zeros(slots + 1),
            "sample_logit": rows,
            "sample_slot": rows,
            "sample_position": np.full(slots, number + 1 + len(outputs)),
            "sample_flags": np.zeros(slots),
        },
    )


def constrained(
    runner: ScriptedRunner, grammars: dict[int, Constraint], *, jump: bool
) -> ConstrainedRunner:
    source = MaskSource(WordBackend(), Requests(grammars), VOCABULARY, jump_forward=jump)
    return ConstrainedRunner(runner, source)


def execute(engine: ConstrainedRunner, plan: Plan) -> Any:
    engine.forward(plan)
    return engine.sample(plan).wait()


def test_what_the_grammar_does_not_have_ends_its_row_alone():
    grammars = {1: Constraint(Words((1, 2, 3))), 2: Constraint(Words((4, 5, 6)))}
    runner = ScriptedRunner([1, 5], [2, 5])
    engine = constrained(runner, grammars, jump=False)
    first = decode_result(execute(engine, step(0, [(0, 1), (1, 2)], 2)))
    assert first["row_errors"].tolist() == [0, 2]
    assert runner.masks[0][:, 0].tolist() == [1 << 1, 1 << 4]
    second = decode_result(execute(engine, step(1, [], 1)))
    assert second["row_errors"].size == 0


def test_a_matcher_that_breaks_ends_its_row_alone():
    grammars = {1: Constraint(Words((None,))), 2: Constraint(Words((4, 5)))}
    engine = constrained(ScriptedRunner([1, 4]), grammars, jump=False)
    result = decode_result(execute(engine, step(0, [(0, 1), (1, 2)], 2)))
    assert result["row_errors"].tolist() == [2, 0]


def test_certain_tokens_follow_at_once_up_to_the_end():
    grammars = {1: Constraint(Words((1, 2, 3))), 2: Constraint(Words((4, 5)), (7, 6))}
    engine = constrained(ScriptedRunner([1, 7], [6]), grammars, jump=True)
    result = decode_result(execute(engine, step(0, [(0, 1), (1, 2)], 2)))
    assert result["sample_counts"].tolist() == [4, 1]
    assert result["token_ids"].tolist() == [1, 2, 3, END, 7]


def test_outputs_that_a_slot_comes_with_are_taken_first():
    runner = ScriptedRunner([3])
    engine = constrained(runner, {1: Constraint(Words((1, 2, 3)), (7, 6))}, jump=False)
    execute(engine, step(0, [(0, 1)], 1, outputs=[5, 7, 6, 1, 2]))
    assert runner.masks[0][0, 0] == 1 << 3


@pytest.mark.parametrize(("outputs", "matchers"), [([1, 2], 1), ([1], 2), ([1, 3], 2)])
def test_a_sequence_that_starts_anew_keeps_its_matcher(
    outputs: list[int], matchers: int, monkeypatch: pytest.MonkeyPatch
):
    """Where it has the outputs that its matcher has taken, and no others."""
    made: list[WordMatcher] = []
    make = WordBackend.matcher
    monkeypatch.setattr(
        WordBackend,
        "matcher",
        lambda backend, words: made.append(one := make(backend, words)) or one,
    )
    runner = ScriptedRunner([1], [2], [3])
    engine = constrained(runner, {1: Constraint(Words((1, 2, 3, 4)))}, jump=False)
    execute(engine, step(0, [(0, 1)], 1))
    execute(engine, step(1, [], 1))
    execute(engine, step(0, [(0, 1)], 1, outputs=outputs, closed=[0]))
    assert len(made) == matchers


def test_a_sample_drawn_for_another_continuation_is_void():
    """The step was launched before it was known that two tokens follow."""
    grammars = {1: Constraint(Words((1, 2, 3, 4, 5)))}
    runner = ScriptedRunner([7], [4])
    engine = constrained(runner, grammars, jump=False)
    engine.forward(step(0, [(0, 1)], 1, outputs=[1, 2]))
    engine.forward(late := step(0, [], 1, outputs=[1]))
    assert engine.awaits_earlier(late)
    result = decode_result(engine.sample(late).wait())
    assert result["row_errors"].size == 0, "what it has drawn is no matter"
    assert runner.masks[0][0, 0] == -1
    execute(engine, step(2, [], 1))
    assert runner.masks[1][0, 0] == 1 << 3


def test_before_it_begins_anything_but_the_end_is_allowed():
    runner = ScriptedRunner([7], [6], [1])
    engine = constrained(runner, {1: Constraint(Words((1, 2)), (7, 6))}, jump=False)
    execute(engine, step(0, [(0, 1)], 1))
    execute(engine, step(1, [], 1))
    execute(engine, step(2, [], 1))
    assert [mask[0, 0] & 0xFF for mask in runner.masks] == [0xFE, 0xFE, 1 << 1]


class SlowWords(WordMatcher):
    """Takes time for every token, as a matcher of an ambiguous grammar does."""

    def accept(self, token_id: int) -> bool:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            continue
        return super().accept(token_id)


def test_a_grammar_that_takes_too_long_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(effort, "FREE_S", 0.05)
    monkeypatch.setattr(effort, "TOKEN_S", 0.001)
    monkeypatch.setattr(
        WordBackend,
        "matcher",
        lambda _, words: (SlowWords if 7 in words.ids else WordMatcher)(words),
    )
    grammars = {1: Constraint(Words((1,) * 20 + (7,))), 2: Constraint(Words((4,) * 20))}
    engine = constrained(ScriptedRunner(*[[1, 4]] * 10), grammars, jump=False)
    errors = []
    for number in range(10):
        opened = [(0, 1), (1, 2)] if number == 0 else []
        errors.append(
            decode_result(execute(engine, step(number, opened, 2)))["row_errors"].tolist()
        )
    assert errors[:2] == [[], []]
    assert errors[-1] == [ROW_GRAMMAR_TOO_SLOW, 0]
