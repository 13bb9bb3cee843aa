"""What the grammar of a schema accepts, rejects and refuses."""

import json
from typing import Any

import jsonschema
import pytest
from tests.engine.schema_tools import accepts, accepts_value, random_texts

from trunkline.engine.grammar.schema import Limits, SchemaError, schema_grammar

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ENFORCED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["a", "abc"], ["", "abcd", "A", 1]),
    ({"type": "string", "minLength": 2, "maxLength": 2}, ["😀é", '"\\'], ["a", "abc"]),
    ({"type": "string", "minLength": 9}, ["a" * 9, "a" * 30], ["a" * 8]),
    ({"type": "string", "maxLength": 2000}, ["", "é" * 2000], ["a" * 2001]),
    ({"enum": ["é\n", "a", {"ü": [1.5, None]}, 3]}, ["é\n", {"ü": [1.5, None]}, 3], ["b", 3.5, {}]),
    ({"type": "integer", "minimum": -5, "exclusiveMaximum": 12}, [-5, 0, 11, 11.0], [-6, 12, 1.5]),
    ({"type": "integer", "minimum": 10**30}, [10**30, 10**31], [10**30 - 1, 0]),
    ({"type": "number", "minimum": 0.25, "maximum": 10}, [0.25, 0.3, 9.99, 10], [0.2, 10.01, -1]),
    ({"type": "integer", "multipleOf": 7, "minimum": 20}, [21, 70007], [14, 22]),
    ({"type": "number", "multipleOf": 0.01}, [19.99, 3, 0.5], [0.001, 19.995]),
    (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
        [[], [3, 1]],
        [[1, 1], [4]],
    ),
    (
        {"prefixItems": [{"const": 1}], "items": {"type": "string"}},
        [[], [1], [1, "a"], {}],
        [[2], [1, 2]],
    ),
    (
        {"type": "array", "contains": {"const": 1}, "maxContains": 2},
        [[1], [0, 1, 1]],
        [[], [0], [1, 1, 1]],
    ),
    (
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^x": {"type": "null"}}},
        [{"a": 1, "x1": None, "b": "s"}, {}, 5],
        [{"a": "s"}, {"x1": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "c": 2}],
    ),
    ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "s"], [3, 1.5]),
    ({"not": {"type": ["string", "null"]}}, [1, [], {}], ["", None]),
    (
        {"if": {"type": "integer"}, "then": {"minimum": 0}, "else": {"type": "string"}},
        [1, "a"],
        [-1, None],
    ),
    (
        {
            "allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}],
            "properties": {"b": {"type": "string"}},
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"a": 1, "b": "s"}],
        [{"b": "s"}, {"a": 1, "c": 1}],
    ),
    (
        TREE,
        [{"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1}, {"value": 1, "next": 2}],
    ),
    ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "x"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31]),
    ({"$ref": "#/$defs/a%25b", "$defs": {"a%b": {"$anchor": "x", "const": 1}}}, [1], [2]),
    ({"items": [{"const": 1}], "additionalItems": False}, [[1], []], [[2], [1, 1]]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), ENFORCED)
def test_exactly_the_valid_values_are_accepted(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    grammar = schema_grammar(schema)
    assert [value for value in valid if not accepts_value(grammar, value)] == []
    assert [value for value in invalid if accepts_value(grammar, value)] == []


@pytest.mark.parametrize("whitespace", ["flexible", "spaced", "compact"])
@pytest.mark.parametrize("schema", [schema for schema, _, _ in ENFORCED])
def test_texts_of_a_grammar_are_valid(schema: dict[str, Any], whitespace: str) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    grammar = schema_grammar(schema, whitespace=whitespace)
    # The package divides floats by 0.01, which is not exact.
    if schema.get("multipleOf") != 0.01 and "additionalItems" not in schema:
        texts = list(random_texts(grammar, 1, 5))
        assert [text for text in texts if not validator.is_valid(json.loads(text))] == []


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        ({"properties": {"a": {"minLenght": 3}}}, "#/properties/a", "minLenght"),
        ({"$ref": "#/$defs/none"}, "#", "$ref"),
        ({"$ref": "http://example.com/a.json"}, "#", "$ref"),
        ({"$ref": "#"}, "#", "$ref"),
        ({"$ref": 5}, "#", "$ref"),
        ({"type": "text"}, "#", "type"),
        ({"items": {"uniqueItems": True}}, "#/items", "uniqueItems"),
        ({"minProperties": 2}, "#", "minProperties"),
        ({"pattern": "(["}, "#", "pattern"),
        ({"pattern": "\\b"}, "#", "pattern"),
        ({"format": "phone"}, "#", "format"),
        ({"type": "string", "nullable": True}, "#", "nullable"),
        ({"minimum": "1"}, "#", "minimum"),
        ({"minimum": 1, "exclusiveMinimum": True}, "#", "exclusiveMinimum"),
        ({"minLength": -1}, "#", "minLength"),
        ({"maxItems": 10**9}, "#", "maxItems"),
        ({"$dynamicRef": "#a"}, "#", "$dynamicRef"),
        ({"$schema": "http://example.com/mine"}, "#", "$schema"),
        ({"anyOf": []}, "#", "anyOf"),
        ({"not": {"patternProperties": {"a": {"type": "null"}}}}, "#/not", "patternProperties"),
        ({"allOf": [{"properties": []}]}, "#/allOf/0", "properties"),
        ({"enum": "a"}, "#", "enum"),
        ("text", "#", ""),
        ("", "#", ""),
        (None, "#", ""),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(schema: Any, path: str, keyword: str) -> None:
    with pytest.raises(SchemaError) as refused:
        schema_grammar(schema)
    assert (refused.value.path, refused.value.keyword) == (path, keyword)


def test_a_misspelt_keyword_is_guessed() -> None:
    with pytest.raises(SchemaError, match="minLenght: is not supported; did you mean minLength"):
        schema_grammar({"minLenght": 3})


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"const": "a", "type": "integer"},
        {"type": "string", "pattern": "^a$", "enum": ["b"]},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3},
    ],
)
def test_what_nothing_satisfies_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="no value satisfies"):
        schema_grammar(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(10)]} for i in range(6)]},
        {"type": "string", "pattern": "(a|b)*a(a|b){20}"},
        {"multipleOf": 12345},
        {"not": {"enum": [f"v{i}" for i in range(50_000)]}},
        {"properties": {f"p{i}": {"minLength": i} for i in range(1000)}, "maxProperties": 900},
    ],
)
def test_what_is_too_large_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError):
        schema_grammar(schema, limits=Limits(rules=5000, grammar_bytes=500_000))


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="deeper"):
        schema_grammar(schema)


def test_equal_schemas_have_equal_grammars() -> None:
    schemas = [schema for schema, _, _ in ENFORCED]
    assert [*map(schema_grammar, schemas)] == [*map(schema_grammar, schemas)]


def test_members_are_written_in_schema_order_and_optional_ones_can_be_left_out() -> None:
    properties = {name: {"type": "integer"} for name in "dbac"}
    schema = {"properties": properties, "required": ["b"], "additionalProperties": False}
    grammar = schema_grammar({"type": "object", **schema}, whitespace="compact")
    assert accepts(grammar, '{"b":1}')
    assert accepts(grammar, '{"d":1,"b":1,"c":1}')
    assert not accepts(grammar, '{"b":1,"d":1}')
    assert not accepts(grammar, '{"d":1,}')
    assert not accepts(grammar, "{}")


def test_blanks_are_bounded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    grammar = schema_grammar(schema)
    assert accepts(grammar, '{\n    "a": [\n        1,\n        2\n    ]\n}')
    assert accepts(grammar, '{"a": [1, 2]}')
    assert not accepts(grammar, '{\n\n"a": []}')
    assert not accepts(grammar, '{  "a": []}')
    assert not accepts(grammar, '{"a":  []}')
    assert not accepts(grammar, "{\n" + " " * 25 + '"a": []}')
    assert accepts(schema_grammar(schema, whitespace="spaced"), '{"a": [1, 2]}')
    assert not accepts(schema_grammar(schema, whitespace="compact"), '{"a": [1]}')
    with pytest.raises(ValueError, match="flexible"):
        schema_grammar(schema, whitespace="any")


def test_closed_objects_and_arrays_hold_what_they_list() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"prefixItems": [{"type": "integer"}]}, "b": {"type": "object"}},
    }
    value = {"a": [1, 2], "b": {"c": 1}}
    assert accepts_value(schema_grammar(schema), {**value, "d": 1})
    closed = schema_grammar(schema, closed=True)
    assert not accepts_value(closed, {**value, "d": 1})
    assert not accepts_value(closed, value)
    assert accepts_value(closed, {**value, "a": [1]})
    allowed = schema_grammar({**schema, "additionalProperties": True}, closed=True)
    assert accepts_value(allowed, {"d": 1})
    only_others = {"type": "object", "properties": {"a": False}, "minProperties": 1}
    assert accepts_value(schema_grammar(only_others, closed=True), {"d": 1})


def test_formats_can_be_annotations() -> None:
    schema = {"type": "string", "format": "date"}
    assert not accepts_value(schema_grammar(schema), "today")
    assert accepts_value(schema_grammar(schema, assert_formats=False), "today")


def test_numbers_end() -> None:
    grammar = schema_grammar({"type": "number"})
    assert accepts(grammar, "-1.5e+300")
    assert accepts(grammar, "1" * 64)
    for text in ("1" * 65, "1e400", "01", "1.", "+1", "0." + "1" * 65):
        assert not accepts(grammar, text)
    assert not accepts(schema_grammar({"type": "number", "minimum": 0}), "1" * 80)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMaximum": 1, "exclusiveMinimum": 0},
        {"type": "number", "not": {"type": "integer"}},
        {"type": "number", "minimum": 1e-9, "exclusiveMaximum": 1e-8},
        {"type": "number", "not": {"enum": [0.5, 1, 2]}, "maximum": 3},
    ],
)
def test_conditions_hold_for_doubles_too(schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    texts = list(random_texts(schema_grammar(schema), 4, 60))
    assert texts
    assert [text for text in texts if not validator.is_valid(json.loads(text))] == []


def test_strings_are_utf_8() -> None:
    grammar = schema_grammar({"type": "string", "minLength": 9, "maxLength": 100})
    for text in random_texts(grammar, 5, 40):
        assert 9 <= len(json.loads(text)) <= 100
    for name in ("name", "other"):
        open_object = schema_grammar({"type": "object", "properties": {name: {"const": 1}}})
        for text in random_texts(open_object, 6, 20):
            assert isinstance(json.loads(text), dict)
