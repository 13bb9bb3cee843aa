"""Deterministic automata over code points: the languages of strings, keys and numbers.

Knows nothing of JSON or of JSON Schema. An automaton is a table with one row per state and one
column per interval of code points; a missing transition leads to no state (`DEAD`). Surrogates are
in no language. Every operation is bounded by `MAX_STATES` and raises `TooLarge` past it.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

DEAD = -1
MAX_STATES = 4096
MAX_CELLS = 200_000
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xE000)

State = TypeVar("State", bound=Hashable)
Interval = tuple[int, int]


class TooLarge(Exception):
    """An automaton would need more than `MAX_STATES` states."""


@dataclass(frozen=True)
class Automaton:
    """A complete description of a regular language; state 0 is the start.

    `starts[c]` is the first code point of column `c`; a column ends before the next one.
    """

    starts: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    accepting: frozenset[int]

    def accepts(self, text: str) -> bool:
        """Whether the whole of `text` is in the language."""
        state = 0
        for character in text:
            state = self.rows[state][bisect_right(self.starts, ord(character)) - 1]
            if state == DEAD:
                return False
        return state in self.accepting

    def is_empty(self) -> bool:
        """Whether no text is in the language (an automaton is kept trimmed)."""
        return not self.accepting

    def edges(self, state: int) -> dict[int, tuple[Interval, ...]]:
        """Targets of a state, each with the code points that lead there."""
        found: dict[int, list[Interval]] = {}
        row = self.rows[state]
        for column, target in enumerate(row):
            if target == DEAD:
                continue
            end = self.starts[column + 1] - 1 if column + 1 < len(self.starts) else _LAST
            spans = found.setdefault(target, [])
            if spans and spans[-1][1] + 1 == self.starts[column]:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((self.starts[column], end))
        return {target: tuple(spans) for target, spans in found.items()}

    def strings(self, limit: int) -> list[str] | None:
        """All texts of the language, or None when there are more than `limit`."""
        found: list[str] = []
        pending: list[tuple[int, str]] = [(0, "")]
        while pending:
            state, text = pending.pop()
            if len(text) > len(self.rows) or len(pending) > 4 * limit:
                return None
            if state in self.accepting:
                found.append(text)
                if len(found) > limit:
                    return None
            for target, spans in self.edges(state).items():
                if sum(last - first + 1 for first, last in spans) > limit:
                    return None
                pending.extend(
                    (target, text + chr(code))
                    for first, last in spans
                    for code in range(first, last + 1)
                )
        return sorted(found)


def build(
    start: State,
    cuts: Iterable[int],
    step: Callable[[State, int], State | None],
    accept: Callable[[State], bool],
) -> Automaton:
    """Explore `step` from `start` and return the smallest automaton.

    `cuts` are the code points where `step` may change its answer; it is asked once per interval,
    for the interval's first code point.
    """
    starts = tuple(sorted({0, *_SURROGATES, *(cut for cut in cuts if cut <= _LAST)}))
    numbers: dict[State, int] = {start: 0}
    order = [start]
    rows: list[tuple[int, ...]] = []
    while len(rows) < len(order):
        state = order[len(rows)]
        row = []
        for first in starts:
            inside = _SURROGATES[0] <= first < _SURROGATES[1]
            target = None if inside else step(state, first)
            if target is None:
                row.append(DEAD)
                continue
            number = numbers.get(target)
            if number is None:
                number = numbers[target] = len(order)
                order.append(target)
                if number >= MAX_STATES or number * len(starts) >= MAX_CELLS:
                    raise TooLarge
            row.append(number)
        rows.append(tuple(row))
    accepting = frozenset(number for state, number in numbers.items() if accept(state))
    return _minimal(_trimmed(Automaton(starts, tuple(rows), accepting)))


def intersection(automata: Sequence[Automaton]) -> Automaton:
    """Texts that are in every language."""
    result = automata[0]
    for other in automata[1:]:
        result = _product(result, other, lambda left, right: left and right, loose=False)
    return result


def union(automata: Sequence[Automaton]) -> Automaton:
    """Texts that are in at least one language."""
    result = automata[0]
    for other in automata[1:]:
        result = _product(result, other, lambda left, right: left or right, loose=True)
    return result


def complement(automaton: Automaton) -> Automaton:
    """Texts that are not in the language."""

    def step(state: int, code: int) -> int:
        return DEAD if state == DEAD else _next(automaton, state, code)

    return build(0, automaton.starts, step, lambda state: state not in automaton.accepting)


def words(texts: Iterable[str]) -> Automaton:
    """The finite language of `texts`."""
    known = sorted(set(texts))
    prefixes = {text[:end] for text in known for end in range(len(text) + 1)} | {""}
    letters = {ord(letter) for text in known for letter in text}
    members = frozenset(known)

    def step(prefix: str, code: int) -> str | None:
        longer = prefix + chr(code)
        return longer if longer in prefixes else None

    cuts = letters | {letter + 1 for letter in letters}
    return build("", cuts, step, lambda prefix: prefix in members)


def lengths(minimum: int, maximum: int | None) -> Automaton:
    """All texts of `minimum` to `maximum` code points."""
    cap = minimum if maximum is None else maximum

    def step(count: int, code: int) -> int | None:
        if count < cap:
            return count + 1
        return count if maximum is None else None

    return build(0, (), step, lambda count: count >= minimum)


def _next(automaton: Automaton, state: int, code: int) -> int:
    return automaton.rows[state][bisect_right(automaton.starts, code) - 1]


def _product(
    left: Automaton, right: Automaton, accept: Callable[[bool, bool], bool], loose: bool
) -> Automaton:
    def step(state: tuple[int, int], code: int) -> tuple[int, int] | None:
        first = DEAD if state[0] == DEAD else _next(left, state[0], code)
        second = DEAD if state[1] == DEAD else _next(right, state[1], code)
        dead = (first == DEAD) + (second == DEAD)
        return None if dead == 2 or (dead and not loose) else (first, second)

    def accepted(state: tuple[int, int]) -> bool:
        return accept(state[0] in left.accepting, state[1] in right.accepting)

    return build((0, 0), (*left.starts, *right.starts), step, accepted)


def _trimmed(automaton: Automaton) -> Automaton:
    """Drop transitions to states from which nothing can be accepted."""
    sources: dict[int, set[int]] = {}
    for state, row in enumerate(automaton.rows):
        for target in row:
            sources.setdefault(target, set()).add(state)
    useful = set(automaton.accepting)
    pending = list(useful)
    while pending:
        for source in sources.get(pending.pop(), ()):
            if source not in useful:
                useful.add(source)
                pending.append(source)
    rows = tuple(
        tuple(target if target in useful else DEAD for target in row) for row in automaton.rows
    )
    return Automaton(automaton.starts, rows, automaton.accepting)


def _minimal(automaton: Automaton) -> Automaton:
    """Merge equal states (Hopcroft), number them from the start, merge equal columns."""
    block_of, count = _blocks(automaton)
    representative: dict[int, int] = {}
    for state, block in enumerate(block_of):
        representative.setdefault(block, state)
    numbers = {block_of[0]: 0}
    order = [block_of[0]]
    rows: list[list[int]] = []
    while len(rows) < len(order):
        row = []
        for target in automaton.rows[representative[order[len(rows)]]]:
            if target == DEAD:
                row.append(DEAD)
                continue
            block = block_of[target]
            if block not in numbers:
                numbers[block] = len(order)
                order.append(block)
            row.append(numbers[block])
        rows.append(row)
    columns = list(zip(*rows, strict=True))
    kept = [
        index for index in range(len(columns)) if index == 0 or columns[index] != columns[index - 1]
    ]
    accepting = frozenset(
        number for block, number in numbers.items() if representative[block] in automaton.accepting
    )
    assert len(order) <= count, "a state belongs to one block"
    return Automaton(
        tuple(automaton.starts[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in rows),
        accepting,
    )


def _blocks(automaton: Automaton) -> tuple[list[int], int]:
    """The coarsest partition of the states (plus `DEAD`) that respects acceptance and steps."""
    total = len(automaton.rows) + 1  # the last one is DEAD
    dead = total - 1
    width = len(automaton.starts)
    incoming: list[dict[int, list[int]]] = [{} for _ in range(width)]
    for state, row in enumerate((*automaton.rows, (DEAD,) * width)):
        for column, target in enumerate(row):
            incoming[column].setdefault(dead if target == DEAD else target, []).append(state)
    accepting = set(automaton.accepting)
    blocks: list[set[int]] = [part for part in (accepting, set(range(total)) - accepting) if part]
    block_of = [0] * total
    for number, block in enumerate(blocks):
        for state in block:
            block_of[state] = number
    pending = set(range(len(blocks)))
    while pending:
        splitter = tuple(blocks[pending.pop()])
        for column in range(width):
            _split(blocks, block_of, pending, [incoming[column].get(s, ()) for s in splitter])
    return block_of, len(blocks)


def _split(
    blocks: list[set[int]],
    block_of: list[int],
    pending: set[int],
    sources: Sequence[Sequence[int]],
) -> None:
    touched: dict[int, list[int]] = {}
    for group in sources:
        for state in group:
            touched.setdefault(block_of[state], []).append(state)
    for number, states in touched.items():
        if len(states) == len(blocks[number]):
            continue
        part = set(states)
        blocks[number] -= part
        fresh = len(blocks)
        blocks.append(part)
        for state in part:
            block_of[state] = fresh
        if number in pending or len(part) <= len(blocks[number]):
            pending.add(fresh)
        else:
            pending.add(number)
