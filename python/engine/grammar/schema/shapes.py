"""What a value of one JSON type must be, as data: the shapes that schemas are reduced to.

A condition on a child value is a `Literals`: a set of node numbers of the schema document, each
with the polarity in which it must hold. Shapes meet (both must hold); alternatives are lists of
shapes. Nothing here looks into a node.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple, TypeVar

from trunkline.engine.grammar.schema.document import FALSE, TRUE
from trunkline.engine.grammar.schema.numbers import NumberTest

Value = TypeVar("Value")
Literals = frozenset[tuple[int, bool]]
ANYTHING: Literals = frozenset()
NOTHING: Literals = frozenset({(FALSE, True)})


def literal(node: int, positive: bool = True) -> Literals:
    """The condition that a node holds, or that it does not."""
    if node in (TRUE, FALSE):
        return ANYTHING if (node == TRUE) == positive else NOTHING
    return frozenset({(node, positive)})


def both(left: Literals, right: Literals) -> Literals:
    """The conjunction of two conditions."""
    joined = left | right
    if any((node, not positive) in joined for node, positive in joined) or NOTHING <= joined:
        return NOTHING
    return joined


@dataclass(frozen=True)
class Null:
    def meet(self, other: "Null") -> "Null | None":
        return self


@dataclass(frozen=True)
class Booleans:
    values: frozenset[bool] = frozenset({False, True})

    def meet(self, other: "Booleans") -> "Booleans | None":
        values = self.values & other.values
        return Booleans(values) if values else None


class StringTest(NamedTuple):
    """One condition on a text: a `pattern`, a `format`, or (kind `words`) membership in `words`."""

    kind: str
    text: str
    words: tuple[str, ...]
    holds: bool


@dataclass(frozen=True)
class Strings:
    values: frozenset[str] | None = None
    minimum: int = 0
    maximum: int | None = None
    tests: frozenset[StringTest] = frozenset()

    def meet(self, other: "Strings") -> "Strings | None":
        maximum = _lower(self.maximum, other.maximum)
        minimum = max(self.minimum, other.minimum)
        values = _common(self.values, other.values)
        if values is not None:
            values = frozenset(text for text in values if _within(len(text), minimum, maximum))
            if not values:
                return None
        if maximum is not None and maximum < minimum:
            return None
        return Strings(values, minimum, maximum, self.tests | other.tests)


@dataclass(frozen=True)
class Numbers:
    values: frozenset[Decimal] | None = None
    tests: frozenset[NumberTest] = frozenset()

    def meet(self, other: "Numbers") -> "Numbers | None":
        values = _common(self.values, other.values)
        tests = self.tests | other.tests
        if values == frozenset() or any(test.negated() in tests for test in tests):
            return None
        return Numbers(values, tests)


class Count(NamedTuple):
    """How many items from index `start` meet `items`; `others` is what the rest meets instead."""

    start: int
    items: Literals
    others: Literals
    minimum: int
    maximum: int | None


@dataclass(frozen=True)
class Arrays:
    heads: tuple[Literals, ...] = ()
    tail: Literals = ANYTHING
    minimum: int = 0
    maximum: int | None = None
    counts: frozenset[Count] = frozenset()
    unique: bool = False

    def meet(self, other: "Arrays") -> "Arrays | None":
        length = max(len(self.heads), len(other.heads))
        heads = tuple(both(self.at(index), other.at(index)) for index in range(length))
        minimum = max(self.minimum, other.minimum)
        maximum = _lower(self.maximum, other.maximum)
        if maximum is not None and maximum < minimum:
            return None
        return Arrays(
            heads,
            both(self.tail, other.tail),
            minimum,
            maximum,
            self.counts | other.counts,
            self.unique or other.unique,
        )

    def at(self, index: int) -> Literals:
        """The condition on the item at an index."""
        return self.heads[index] if index < len(self.heads) else self.tail


class Rest(NamedTuple):
    """Keys not among `names` that match none of `patterns` have values that meet `values`."""

    names: frozenset[str]
    patterns: frozenset[str]
    values: Literals


class Exists(NamedTuple):
    """A key exists: none of `names`, no match of `without`, a match of `pattern`, meeting `key`."""

    names: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    pattern: str | None = None
    key: Literals = ANYTHING


@dataclass(frozen=True)
class Objects:
    names: tuple[tuple[str, Literals], ...] = ()
    patterns: frozenset[tuple[str, Literals]] = frozenset()
    rests: frozenset[Rest] = frozenset()
    required: frozenset[str] = frozenset()
    keys: Literals = ANYTHING
    minimum: int = 0
    maximum: int | None = None
    exists: frozenset[Exists] = frozenset()
    # Not part of what it means: the names that schemas mention, in their order.
    order: tuple[str, ...] = field(default=(), compare=False)

    def meet(self, other: "Objects") -> "Objects | None":
        names = dict(self.names)
        for name, values in other.names:
            names[name] = both(names.get(name, ANYTHING), values)
        required = self.required | other.required
        minimum = max(self.minimum, other.minimum, len(required))
        maximum = _lower(self.maximum, other.maximum)
        if maximum is not None and maximum < minimum:
            return None
        if any(names.get(name) == NOTHING for name in required):
            return None
        return Objects(
            tuple(sorted(names.items(), key=lambda item: item[0])),
            self.patterns | other.patterns,
            self.rests | other.rests,
            required,
            both(self.keys, other.keys),
            minimum,
            maximum,
            self.exists | other.exists,
            tuple(dict.fromkeys((*self.order, *other.order))),
        )


Shape = Null | Booleans | Strings | Numbers | Arrays | Objects

_UNRESTRICTED: dict[str, Shape] = {
    "null": Null(),
    "boolean": Booleans(),
    "number": Numbers(),
    "string": Strings(),
    "array": Arrays(),
    "object": Objects(),
}
TYPES = tuple(_UNRESTRICTED)
Cases = dict[str, tuple[Shape, ...]]


def everything() -> Cases:
    """The alternatives of a schema without conditions."""
    return {name: (shape,) for name, shape in _UNRESTRICTED.items()}


def only(name: str, *shapes: Shape) -> Cases:
    """Alternatives of one type only."""
    return {name: shapes}


def restricting(name: str, *shapes: Shape) -> Cases:
    """Alternatives for one type; values of other types are free."""
    return {**everything(), name: shapes}


def is_free(name: str, shape: Shape) -> bool:
    """Whether a shape allows every value of its type."""
    return shape == _UNRESTRICTED[name]


def either(parts: "list[Cases]") -> Cases:
    """Values that are in at least one of the parts."""
    result: Cases = {}
    for name in TYPES:
        shapes = tuple(dict.fromkeys(shape for part in parts for shape in part.get(name, ())))
        if _UNRESTRICTED[name] in shapes:
            free = [shape for shape in shapes if is_free(name, shape)]
            shapes = (free[0],)
        if name == "boolean" and len(shapes) > 1:
            values = [shape.values for shape in shapes if isinstance(shape, Booleans)]
            shapes = (Booleans(frozenset().union(*values)),)
        if shapes:
            result[name] = shapes
    return result


def meet(left: Cases, right: Cases) -> Cases:
    """Values that are in both."""
    result: Cases = {}
    for name in TYPES:
        shapes: dict[Shape, None] = {}
        for first in left.get(name, ()):
            for second in right.get(name, ()):
                joined = first.meet(second)  # type: ignore[arg-type]  # both are of the type `name`
                if joined is not None:
                    shapes[joined] = None
        if shapes:
            result[name] = tuple(shapes)
    return result


def _lower(left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return right if left is None else left
    return min(left, right)


def _within(length: int, minimum: int, maximum: int | None) -> bool:
    return minimum <= length and (maximum is None or length <= maximum)


def _common(
    left: frozenset[Value] | None, right: frozenset[Value] | None
) -> frozenset[Value] | None:
    if left is None or right is None:
        return right if left is None else left
    return left & right
