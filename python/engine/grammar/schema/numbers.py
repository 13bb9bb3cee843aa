"""Numbers as texts: automata over the decimal spellings of JSON numbers.

Every automaton here is a set of *values*: it has all plain decimal spellings of a value (`1`,
`1.0`, `1.00`) or none, so that complements and intersections mean what they mean for numbers.
Exponents and the negative zero are in none.
"""

from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from trunkline.engine.grammar.schema.automaton import (
    Automaton,
    TooLarge,
    build,
    complement,
    intersection,
)
from trunkline.engine.grammar.schema.regex import regex_automaton

MAX_DIGITS = 400
_CUTS = (*(ord(letter) for letter in "-./0123456789:"), ord("-") + 1)
_ORDERS = {"at_least": (0, 1), "above": (1,), "equal": (0,)}
_DECIMALS = r"^((0|[1-9]\d*)(\.\d+)?|-([1-9]\d*(\.\d+)?|0\.\d*[1-9]\d*))$"
_WHOLE = r"^[^.]*(\.0+)?$"
# What a double tells apart from its neighbours: 15 significant digits.
_EXACT_IN_DOUBLE = r"^-?(\d+|0\.\d{1,15}|[1-9]\d{0,8}\.\d{1,6}|[1-9]\d{9,12}\.\d{1,2})$"
_PLAIN_WHOLE = r"^(0|-?[1-9]\d*)$"


class NumberTest(NamedTuple):
    """One condition: `at_least` / `above` / `equal` a value, a `multiple` of it, or `whole`."""

    kind: str
    value: Decimal
    holds: bool

    def negated(self) -> "NumberTest":
        return self._replace(holds=not self.holds)


WHOLE = NumberTest("whole", Decimal(0), True)


def exact(value: int | float) -> Decimal:
    """The decimal that the shortest spelling of `value` denotes.

    Raises:
        TooLarge: It has more than `MAX_DIGITS` digits on a side of its point.
    """
    number = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int), "JSON has no infinities"
    while exponent < 0 and digits[-1] == 0 and len(digits) > 1:
        digits, exponent = digits[:-1], exponent + 1
    if not any(digits):
        return Decimal(0)
    if len(digits) + max(exponent, 0) > MAX_DIGITS or -exponent > MAX_DIGITS:
        raise TooLarge
    digits += (0,) * max(exponent, 0)
    return Decimal((sign, digits, min(exponent, 0)))


def spelling(value: Decimal) -> str:
    """The shortest plain decimal spelling."""
    return format(value, "f")


def satisfies(value: Decimal, tests: Iterable[NumberTest]) -> bool:
    """Whether a value meets every condition."""
    return all(_automaton(test).accepts(spelling(value)) for test in tests)


@lru_cache(maxsize=64)
def number_automaton(tests: frozenset[NumberTest], max_digits: int) -> Automaton:
    """Spellings of the values that meet `tests`; plain integers when all of them are integers.

    Others are spelt with at most 15 significant digits where that leaves any: a reader that rounds
    to doubles then still finds every condition met.

    Loops over several states (divisibility) are cut at `max_digits`; loops over one state are
    the printer's to cut.
    """
    parts = [regex_automaton(_DECIMALS), *map(_automaton, sorted(tests))]
    if any(_means_whole(test) for test in tests):
        parts.append(regex_automaton(_PLAIN_WHOLE))
    result = intersection(parts)
    exact_in_double = intersection([result, regex_automaton(_EXACT_IN_DOUBLE)])
    if not exact_in_double.is_empty():
        result = exact_in_double
    if any(test.kind == "multiple" for test in tests) and _has_long_loop(result):
        digits = rf"^-?\d{{1,{max_digits}}}(\.\d{{1,{max_digits}}})?$"
        result = intersection([result, regex_automaton(digits)])
    return result


def _means_whole(test: NumberTest) -> bool:
    whole_step = test.kind == "multiple" and test.value == test.value.to_integral_value()
    return test.holds and (test.kind == "whole" or whole_step)


def _has_long_loop(automaton: Automaton) -> bool:
    indegree = [0] * len(automaton.rows)
    targets = [
        {target for target in row if target >= 0 and target != state}
        for state, row in enumerate(automaton.rows)
    ]
    for row in targets:
        for target in row:
            indegree[target] += 1
    ready = [state for state, count in enumerate(indegree) if not count]
    for state in ready:
        for target in targets[state]:
            indegree[target] -= 1
            if not indegree[target]:
                ready.append(target)
    return len(ready) < len(automaton.rows)


@lru_cache(maxsize=64)
def _automaton(test: NumberTest) -> Automaton:
    if not test.holds:
        return intersection([regex_automaton(_DECIMALS), complement(_automaton(test.negated()))])
    if test.kind == "whole":
        return intersection([regex_automaton(_DECIMALS), regex_automaton(_WHOLE)])
    if test.kind == "multiple":
        return _multiples(test.value)
    return _comparison(test.kind, test.value)


def _multiples(divisor: Decimal) -> Automaton:
    """Values that are an integer times `divisor`, which is `units` times a power of ten."""
    exponent = divisor.as_tuple().exponent
    assert isinstance(exponent, int), "a divisor is finite"
    scale = max(-exponent, 0)
    units = int(divisor.scaleb(scale))
    if units * (scale + 2) > 2048:
        raise TooLarge

    def step(state: tuple[int, int], code: int) -> tuple[int, int] | None:
        remainder, places = state  # places: -1 before the point
        letter = chr(code)
        if letter == "-":
            return state
        if letter == ".":
            return (remainder, 0) if places < 0 else None
        if not letter.isdigit():
            return None
        if 0 <= places == scale:
            return state if letter == "0" else None
        return (remainder * 10 + int(letter)) % units, places + 1 if places >= 0 else -1

    def accept(state: tuple[int, int]) -> bool:
        missing: int = 10 ** (scale - max(state[1], 0))
        return state[0] * missing % units == 0

    return intersection([regex_automaton(_DECIMALS), build((0, -1), _CUTS, step, accept)])


class _Progress(NamedTuple):
    """A magnitude compared with the bound's, digit by digit.

    `places` counts digits, before the point up to one more than the bound has; `order` is the
    comparison of the digits so far (-1, 0, 1).
    """

    negative: bool
    fraction: bool
    places: int
    order: int


def _comparison(kind: str, bound: Decimal) -> Automaton:
    comparison = _Comparison(bound)
    compared = build(
        _Progress(False, False, 0, 0),
        _CUTS,
        comparison.step,
        lambda state: comparison.order(state) in _ORDERS[kind],
    )
    return intersection([regex_automaton(_DECIMALS), compared])


class _Comparison:
    """Compares a spelling with a bound, one character at a time."""

    def __init__(self, bound: Decimal) -> None:
        self._negative = bound < 0
        self._whole, _, self._fraction = spelling(abs(bound)).partition(".")

    def step(self, state: _Progress, code: int) -> _Progress | None:
        """The progress after one more character."""
        letter = chr(code)
        if letter == "-":
            return state._replace(negative=True)
        if letter == ".":
            ended = self._ended(state)
            return None if state.fraction else _Progress(state.negative, True, 0, ended)
        if not letter.isdigit():
            return None
        digits = self._fraction if state.fraction else self._whole
        expected = digits[state.places] if state.places < len(digits) else "0"
        order = state.order or (letter > expected) - (letter < expected)
        if not state.fraction and state.places >= len(digits):
            order = 1
        cap = len(digits) if state.fraction else len(digits) + 1
        return state._replace(places=min(state.places + 1, cap), order=order)

    def order(self, state: _Progress) -> int:
        """How the number that ends here compares with the bound: -1, 0 or 1."""
        order = state.order if state.fraction else self._ended(state)
        if order == 0 and len(self._fraction) > (state.places if state.fraction else 0):
            order = -1
        if state.negative:
            return -order if self._negative else -1
        return 1 if self._negative else order

    def _ended(self, state: _Progress) -> int:
        """The comparison of the whole part, once all its digits are known."""
        return -1 if state.places < len(self._whole) else state.order
