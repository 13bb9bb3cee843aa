"""Proofs that no value meets a condition, so that alternatives are known to be disjoint.

A proof looks a few levels deep and never guesses: without one, a condition counts as possible.
"""

from collections.abc import Callable

from trunkline.engine.grammar.schema.automaton import TooLarge
from trunkline.engine.grammar.schema.document import CircularSchema
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Arrays,
    Cases,
    Literals,
    Numbers,
    Objects,
    Shape,
    Strings,
)
from trunkline.engine.grammar.schema.texts import (
    number_values,
    numbers_automaton,
    string_automaton,
    string_values,
)

DEPTH = 4


class Emptiness:
    """Proofs over the alternatives that `cases` gives for a condition."""

    def __init__(self, cases: Callable[[Literals], Cases]) -> None:
        self._cases = cases
        self._proven: set[Literals] = {NOTHING}

    def proven(self, condition: Literals, depth: int = DEPTH) -> bool:
        """Whether no value meets the condition."""
        if condition in self._proven:
            return True
        if condition == ANYTHING or depth == 0:
            return False
        try:
            cases = self._cases(condition)
        except CircularSchema:
            return False
        if all(self._empty(shape, depth) for shapes in cases.values() for shape in shapes):
            self._proven.add(condition)
            return True
        return False

    def _empty(self, shape: Shape, depth: int) -> bool:
        match shape:
            case Strings():
                return _no_string(shape)
            case Numbers():
                return _no_number(shape)
            case Arrays():
                return any(
                    self.proven(shape.at(index), depth - 1)
                    for index in range(min(shape.minimum, len(shape.heads) + 1))
                )
            case Objects():
                names = dict(shape.names)
                return any(
                    self.proven(self._member(shape, name, names.get(name, ANYTHING)), depth - 1)
                    for name in sorted(shape.required)
                )
            case _:
                return False

    def _member(self, shape: Objects, name: str, values: Literals) -> Literals:
        for rest in shape.rests:
            if name not in rest.names and not rest.patterns:
                values = values | rest.values
        return NOTHING if values >= NOTHING else values


def _no_string(shape: Strings) -> bool:
    values = string_values(shape)
    if values is not None:
        return not values
    try:
        return bool(shape.tests) and string_automaton(shape).is_empty()
    except TooLarge:
        return False


def _no_number(shape: Numbers) -> bool:
    values = number_values(shape)
    if values is not None:
        return not values
    try:
        return bool(shape.tests) and numbers_automaton(shape).is_empty()
    except TooLarge:
        return False
