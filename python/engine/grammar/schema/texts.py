"""From the shapes of strings and numbers to their languages, cached."""

from decimal import Decimal
from functools import lru_cache

from trunkline.engine.grammar.schema.automaton import (
    Automaton,
    complement,
    intersection,
    lengths,
    words,
)
from trunkline.engine.grammar.schema.formats import FORMATS
from trunkline.engine.grammar.schema.numbers import number_automaton, satisfies
from trunkline.engine.grammar.schema.regex import regex_automaton
from trunkline.engine.grammar.schema.shapes import Numbers, Strings, StringTest

MAX_LOOP_DIGITS = 18


@lru_cache(maxsize=64)
def string_test_automaton(test: StringTest) -> Automaton:
    """The texts that meet one condition."""
    if test.kind == "words":
        automaton = words(test.words)
    else:
        automaton = regex_automaton(FORMATS[test.text] if test.kind == "format" else test.text)
    return automaton if test.holds else complement(automaton)


@lru_cache(maxsize=64)
def string_values(shape: Strings) -> tuple[str, ...] | None:
    """The texts of a shape that lists its texts, else None."""
    if shape.values is None:
        return None
    tests = [string_test_automaton(test) for test in shape.tests]
    return tuple(text for text in sorted(shape.values) if all(test.accepts(text) for test in tests))


@lru_cache(maxsize=64)
def string_automaton(shape: Strings) -> Automaton:
    """The texts of a shape."""
    values = string_values(shape)
    if values is not None:
        return words(values)
    parts = [string_test_automaton(test) for test in sorted(shape.tests)]
    if shape.minimum or shape.maximum is not None or not parts:
        parts.append(lengths(shape.minimum, shape.maximum))
    return intersection(sorted(parts, key=lambda part: len(part.rows)))


@lru_cache(maxsize=64)
def number_values(shape: Numbers) -> tuple[Decimal, ...] | None:
    """The values of a shape that lists its values, else None."""
    if shape.values is None:
        return None
    return tuple(value for value in sorted(shape.values) if satisfies(value, shape.tests))


def numbers_automaton(shape: Numbers) -> Automaton:
    """The plain decimal spellings of a shape that lists no values."""
    return number_automaton(shape.tests, MAX_LOOP_DIGITS)
