"""Grammars that are random automata, behind the interfaces of `engine.grammar`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trunkline.engine.grammar.backend import Masks
from trunkline.engine.grammar.compilers import Finished
from trunkline.engine.messages import GrammarSpec

MAX_STATES = 6


@dataclass(frozen=True)
class Automaton:
    """`moves[state]` has the next state by id; states in `finals` allow the end."""

    moves: tuple[dict[int, int], ...]
    finals: frozenset[int]
    end_id: int
    num_bytes: int = 100


def random_automaton(seed: int, vocab_size: int, end_id: int) -> Automaton:
    """States that allow few ids, a third of them a single one; now and then a dead end."""
    source = random.Random(seed)
    count = source.randint(2, MAX_STATES)
    ids = [one for one in range(vocab_size) if one != end_id]
    moves = []
    for _ in range(count):
        few = 1 if source.random() < 0.35 else source.randint(2, min(4, len(ids)))
        moves.append({one: source.randrange(count) for one in source.sample(ids, few)})
    finals = {state for state in range(count) if source.random() < 0.3}
    if source.random() < 0.3:
        moves[-1] = {}
        if source.random() < 0.7:
            finals.add(count - 1)
    return Automaton(tuple(moves), frozenset(finals), end_id)


class AutomatonMatcher:
    def __init__(self, automaton: Automaton, misuses: list[str]) -> None:
        self.automaton = automaton
        self.misuses = misuses
        self.state = 0
        self.ended = False

    def accept(self, token_id: int) -> bool:
        if self.ended:
            self.misuses.append("a token came after the end")
            return False
        if token_id == self.automaton.end_id and self.state in self.automaton.finals:
            self.ended = True
            return True
        following = self.automaton.moves[self.state].get(token_id)
        if following is None:
            return False
        self.state = following
        return True

    def may_end(self) -> bool:
        return not self.ended and self.state in self.automaton.finals

    def fill(self, mask: np.ndarray) -> None:
        if self.ended:
            self.misuses.append("a mask was asked for after the end")
        mask[:] = 0
        ids = [*self.automaton.moves[self.state]]
        if self.may_end():
            ids.append(self.automaton.end_id)
        for one in ids:
            mask[one >> 5] |= np.int32(1 << (one & 31))


class AutomatonBackend:
    """`misuses` lists what a matcher should not have been asked."""

    def __init__(self) -> None:
        self.misuses: list[str] = []

    def compile(self, spec: GrammarSpec) -> bytes:
        raise NotImplementedError

    def load(self, data: bytes) -> Automaton:
        raise NotImplementedError

    def matcher(self, compiled: Automaton) -> AutomatonMatcher:
        return AutomatonMatcher(compiled, self.misuses)

    def accept(self, matchers: Sequence[AutomatonMatcher], token_ids: Sequence[int]) -> list[bool]:
        return [one.accept(token) for one, token in zip(matchers, token_ids, strict=True)]

    def fill(self, matchers: Sequence[AutomatonMatcher], masks: Masks, rows: Sequence[int]) -> None:
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(masks[row])


class AutomatonCompiler:
    """Makes the automaton of a number; some take a few polls, those below 0 fail."""

    def __init__(self, vocab_size: int, end_id: int) -> None:
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.jobs: list[list[int]] = []  # polls left, key, seed

    def submit(self, key: int, spec: GrammarSpec) -> None:
        self.jobs.append([int(spec.text) % 4, key, int(spec.text)])

    def cancel(self, key: int) -> None:
        self.jobs = [job for job in self.jobs if job[1] != key]

    def finished(self) -> list[Finished]:
        for job in self.jobs:
            job[0] -= 1
        done = [job for job in self.jobs if job[0] < 0]
        self.jobs = [job for job in self.jobs if job[0] >= 0]
        return [self.outcome(key, seed) for _, key, seed in done]

    def outcome(self, key: int, seed: int) -> Finished:
        if seed < 0:
            return Finished(key, 0.0, error="it is odd")
        return Finished(key, 0.0, random_automaton(seed, self.vocab_size, self.end_id))

    def close(self) -> None:
        pass
