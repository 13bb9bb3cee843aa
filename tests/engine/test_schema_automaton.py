"""Automata, regular expressions and number automata against Python's own."""

import re
from decimal import Decimal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.engine.schema_tools import accepts

from trunkline.engine.grammar.schema import RegexError, regex_grammar
from trunkline.engine.grammar.schema.automaton import (
    TooLarge,
    complement,
    intersection,
    lengths,
    union,
    words,
)
from trunkline.engine.grammar.schema.numbers import NumberTest, exact, number_automaton
from trunkline.engine.grammar.schema.regex import regex_automaton

letters = st.text("ab\n-1é😀", max_size=6)
atoms = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\W", "é", "😀", "[a-z-]", r"\-", "^", "$"]
)


def _quantified(part: str, suffix: str) -> str:
    return part if part in "^$" else f"(?:{part}){suffix}"


patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds(
            _quantified, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "{0,}"])
        ),
    ),
    max_leaves=8,
)


def python_pattern(pattern: str) -> re.Pattern[str]:
    """The same pattern for Python, where `$` and `.` mean something else."""
    return re.compile(pattern.replace("$", r"\Z").replace(".", r"[^\n]"), re.ASCII)


@settings(deadline=None, max_examples=100)
@given(patterns, st.lists(letters, min_size=5, max_size=20))
def test_patterns_match_what_python_matches(pattern: str, texts: list[str]) -> None:
    found, whole = regex_automaton(pattern), regex_automaton(pattern, whole=True)
    expected = python_pattern(pattern)
    for text in texts:
        assert found.accepts(text) == bool(expected.search(text)), text
        assert whole.accepts(text) == bool(expected.fullmatch(text)), text
        assert complement(found).accepts(text) != found.accepts(text)


@settings(deadline=None, max_examples=50)
@given(patterns, patterns, st.integers(0, 3), st.lists(letters, min_size=5, max_size=20))
def test_languages_combine(first: str, second: str, size: int, texts: list[str]) -> None:
    left, right = regex_automaton(first), regex_automaton(second)
    some = words(texts[:2])
    bounded = intersection([left, lengths(size, size + 2)])
    for text in texts:
        assert intersection([left, right]).accepts(text) == (
            left.accepts(text) and right.accepts(text)
        )
        assert union([left, some]).accepts(text) == (left.accepts(text) or text in texts[:2])
        assert bounded.accepts(text) == (left.accepts(text) and size <= len(text) <= size + 2)


def test_finite_languages_are_listed() -> None:
    assert regex_automaton("^(a|b)c?$").strings(10) == ["a", "ac", "b", "bc"]
    assert regex_automaton("^a*$").strings(10) is None
    assert words([]).is_empty()
    assert intersection([words(["a"]), words(["b"])]).strings(5) == []


@pytest.mark.parametrize(
    "pattern",
    [
        "([", "*a", "^?[0-9]$", "a)", "(a", "a{3,2}", "a{99999}", "[z-a]", "a**", r"\b", r"(a)\1",
        "(?<=a)b",
        "(?i)a", "a(?=b)", r"\p{Greek}", "\\", "[a", r"\u12", r"\q", "a++", "(" * 200, "(?#x)",
    ],
)  # fmt: skip
def test_what_an_automaton_cannot_do_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        regex_automaton(pattern)


def test_too_many_states_are_refused() -> None:
    with pytest.raises(TooLarge):
        regex_automaton("(a|b)*a(a|b){20}")


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"^\p{Lu}\p{Ll}+$", ["Éa", "Ab"], ["ab", "A1"]),
        (r"^(?!x)(?:a|x)+$", ["a", "ax"], ["x", "xa"]),
        (r"^\u{1F600}$", ["😀"], ["a"]),
        ("^\\uD83D\\uDE00$", ["😀"], ["a"]),
        (r"^[\s]$", [" ", "\u2003", "\ufeff"], ["a"]),
        (r"^(?<year>\d{4})$", ["1999"], ["٣٣٣٣"]),
        (r"^a{,2}$", ["a{,2}"], ["a"]),
        ("a|^$", ["", "ba"], ["b"]),
    ],
)
def test_ecma_details(pattern: str, matching: list[str], other: list[str]) -> None:
    automaton = regex_automaton(pattern)
    assert [text for text in (*matching, *other) if automaton.accepts(text)] == matching


def test_a_regex_becomes_a_grammar_of_whole_matches() -> None:
    grammar = regex_grammar(r'(Paris|London)\n"é😀\\')
    assert accepts(grammar, 'Paris\n"é😀\\')
    assert not accepts(grammar, 'Paris\n"é😀')
    with pytest.raises(RegexError, match="matches no text"):
        regex_grammar("a^b")


plain_decimals = st.builds(
    lambda sign, whole, places: f"{sign}{whole}{places}",
    st.sampled_from(["", "-"]),
    st.integers(0, 2000).map(str),
    st.sampled_from(["", ".0", ".5", ".50", ".05", ".25", ".001", ".999"]),
).filter(lambda text: Decimal(text) != 0 or not text.startswith("-"))


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["at_least", "above", "equal", "multiple", "whole"]),
    st.sampled_from([0, 1, -1, 5, 10, 12.5, -0.05, 99, 100, 0.001, -7, 123456, -99.5, 0.25]),
    st.booleans(),
    st.lists(plain_decimals, min_size=10, max_size=30),
)
def test_number_automata_compare_values(
    kind: str, value: int | float, holds: bool, texts: list[str]
) -> None:
    bound = exact(value)
    if kind == "multiple" and not 0 < bound < 1000:
        return
    automaton = number_automaton(frozenset({NumberTest(kind, bound, holds)}), 18)
    whole_only = holds and (
        kind == "whole" or (kind == "multiple" and bound == bound.to_integral_value())
    )
    for text in texts:
        number = Decimal(text)
        truth = {
            "at_least": number >= bound,
            "above": number > bound,
            "equal": number == bound,
            "multiple": kind == "multiple" and number % bound == 0,
            "whole": number == number.to_integral_value(),
        }[kind]
        expected = truth == holds and not (whole_only and "." in text)
        assert automaton.accepts(text) == expected, text
