"""Generated schemas against the `jsonschema` package: what is enforced is enforced exactly."""

import json
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from tests.engine.schema_tools import accepts_value, random_texts

from trunkline.engine.grammar.schema import SchemaError, schema_grammar

NAMES = ["a", "b", "ab", "ü"]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10, 12, 1.5, -0.5, 2.25, "", "a", "b", "ab", "aab", "ü",
    "10", 'q"', "x\\", "\n", [], [1], [1, 1], ["a", 1], [0, 1, 2], [[]], [{}], [None, True], {},
    {"a": 1},
    {"a": "b"}, {"b": None}, {"a": 1, "b": 2}, {"ab": 1.5}, {"ü": []}, {"c": 1}, {"a": {"a": 1}},
    {"a": {"b": "a"}, "c": True}, {"a": [1], "b": [True]}, {"c": 1, "d": 2},
]  # fmt: skip
# Python's `$` also matches before a last newline, and its `\Z` is what `$` is here.
PATTERNS = ["^a", r"b\Z", r"^[ab]*\Z", r"a|^\Z", r"^[^\n]{1,2}\Z", "^(?!a)", r"^[^ ]+\Z", "[0-9]"]

numbers = st.sampled_from([-2, -1, 0, 0.5, 1, 1.5, 2, 3, 10, 11.25])
sizes = st.integers(0, 3)
names = st.sampled_from(NAMES)
scalars = st.fixed_dictionaries(
    {},
    optional={
        "type": st.one_of(
            st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"]),
            st.lists(
                st.sampled_from(["string", "integer", "null", "object"]), unique=True, min_size=1
            ),
        ),
        "minimum": numbers,
        "maximum": numbers,
        "exclusiveMinimum": numbers,
        "exclusiveMaximum": numbers,
        "multipleOf": st.sampled_from([1, 2, 3, 5]),
        "minLength": sizes,
        "maxLength": sizes,
        "pattern": st.sampled_from(PATTERNS),
    },
)
literals = st.one_of(
    st.builds(lambda value: {"const": value}, st.sampled_from(VALUES)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.sampled_from(VALUES), min_size=1, max_size=6)
    ),
    st.booleans(),
    st.just({"$ref": "#/$defs/tree"}),
    st.just({"$ref": "#/$defs/few"}),
)


def _with_children(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    branches = st.lists(children, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(names, children, max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), children, max_size=2),
            "additionalProperties": children,
            "required": st.lists(names, unique=True, max_size=2),
            "propertyNames": children,
            "minProperties": sizes,
            "maxProperties": sizes,
            "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2), max_size=2),
            "dependentSchemas": st.dictionaries(names, children, max_size=1),
            "prefixItems": branches,
            "items": children,
            "minItems": sizes,
            "maxItems": sizes,
            "contains": children,
            "minContains": sizes,
            "maxContains": sizes,
            "uniqueItems": st.booleans(),
            "allOf": branches,
            "anyOf": branches,
            "oneOf": branches,
            "not": children,
            "if": children,
            "then": children,
            "else": children,
            "unevaluatedProperties": st.booleans(),
            "unevaluatedItems": st.booleans(),
        },
    ).map(_few_keywords)


def _few_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    """Schemas with many random keywords at once have no values."""
    kept = sorted(schema, key=lambda keyword: json.dumps([keyword, schema[keyword]])[::-1])[:3]
    return {keyword: schema[keyword] for keyword in kept}


schemas = st.recursive(scalars.map(_few_keywords) | literals, _with_children, max_leaves=6)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A whole schema, with definitions that the generated references lead to."""
    root = draw(schemas)
    tree = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/tree"}, "b": draw(literals)},
        "additionalProperties": False,
    }
    few = {"enum": draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))}
    return {"$defs": {"tree": tree, "few": few}, "allOf": [root]}


def check(schema: dict[str, Any], seed: int) -> None:
    """The grammar accepts just the valid ones of the sample values, and writes only valid ones."""
    validator = jsonschema.Draft202012Validator(schema)
    try:
        grammar = schema_grammar(schema)
    except SchemaError as error:
        if error.message == "no value satisfies this schema":
            assert not any(validator.is_valid(value) for value in VALUES)
        return
    for value in VALUES:
        assert accepts_value(grammar, value) == validator.is_valid(value), (value, grammar)
    for whitespace in ("flexible", "compact", "spaced"):
        for closed in (False, True):
            grammar = schema_grammar(schema, whitespace=whitespace, closed=closed)
            for text in random_texts(grammar, seed, 3):
                assert validator.is_valid(json.loads(text)), (text, grammar)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(documents(), st.integers(0, 1000))
def test_generated_schemas_are_enforced_exactly(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents(), st.integers(0, 1000))
def test_many_generated_schemas_are_enforced_exactly(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)
