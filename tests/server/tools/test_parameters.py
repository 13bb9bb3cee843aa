"""Arguments that a format writes as text."""

from __future__ import annotations

from typing import Any

import pytest

from trunkline.server.openai.tools.parameters import ArgumentsText, argument

SCHEMA = {
    "$defs": {"Name": {"enum": ["a", "1"]}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "text": {"type": "string"},
        "name": {"$ref": "#/$defs/Name"},
        "loop": {"$ref": "#/$defs/Loop"},
        "number": {"type": "number"},
        "flag": {"type": ["boolean", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "any": {},
        "true": True,
        "odd": {"enum": 5, "anyOf": "x", "type": 7, "$ref": 3},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("text", "12", '"12"'),
        ("text", 'a "b"\n', '"a \\"b\\"\\n"'),
        ("name", "1", '"1"'),
        ("loop", "1", "1"),
        ("number", "1.5", "1.5"),
        ("number", "many", '"many"'),
        ("flag", "True", "true"),
        ("flag", "None", "null"),
        ("either", "12", "12"),
        ("either", "true", '"true"'),
        ("any", '{"a": [1]}', '{"a": [1]}'),
        ("any", "NaN", '"NaN"'),
        ("any", "[" * 5000, '"' + "[" * 5000 + '"'),
        ("any", '"\\ud800"', '"\\"\\\\ud800\\""'),
        ("true", "1", "1"),
        ("odd", "1", "1"),
        ("unknown", "1", "1"),
    ],
)
def test_what_a_text_is_in_json(key: str, text: str, wanted: str):
    assert argument(SCHEMA, key, text) == wanted


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": []}])
def test_schemas_without_properties(schema: dict[str, Any]):
    assert argument(schema, "x", "1") == "1"


def test_a_key_that_comes_twice_counts_once():
    arguments = ArgumentsText(SCHEMA)
    parts = [arguments.add("any", "1"), arguments.add("any", "2"), arguments.add("text", "x")]
    assert "".join(parts) + arguments.close() == '{"any": 1, "text": "x"}'
