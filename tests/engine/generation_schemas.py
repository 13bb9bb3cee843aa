"""Varied JSON Schemas of moderate size: nested, recursive, with unicode, patterns and bounds."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def an_object(**properties: Any) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def items(schema: Any, least: int, most: int, **more: Any) -> Schema:
    return {"type": "array", "items": schema, "minItems": least, "maxItems": most, **more}


def whole(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


BOOLEAN: Schema = {"type": "boolean"}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,8}$"}
POINT = an_object(x=whole(-9, 9), y=whole(-9, 9))
SCALARS: list[Schema] = [
    BOOLEAN,
    {"type": "null"},
    {"const": "日本語"},
    {"const": {"a": [1, None, "ü"]}},
    {"enum": ["ja", "nein", "vielleicht", 3, None, [1]]},
    {"enum": ["👩‍🚀", 'quote"', "back\\slash", "tab\t", "é"]},
    text(0),
    text(12),
    text(20, minLength=5),
    WORD,
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(?:[äöü]|ß){1,5}$"},
    {"type": "string", "pattern": "^\\d{3}\\.\\d{2}$"},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    whole(0, 7),
    whole(-1000, -998),
    whole(17, 123456),
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    whole(0, 100, multipleOf=7),
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 50},
]
CONTAINERS: list[Schema] = [
    an_object(name=text(10), age=whole(0, 120)),
    an_object(**{"größe": whole(1, 9), "名前": text(5), "a b": BOOLEAN, 'q"q': {"type": "null"}}),
    an_object(id=SCALARS[10], when=SCALARS[14], ok=BOOLEAN),
    an_object(outer=an_object(inner=an_object(deep=an_object(deepest=BOOLEAN)))),
    an_object(points=items(POINT, 1, 4)),
    an_object(tags=items(WORD, 0, 3), kind={"enum": ["a", "b"]}),
    an_object(matrix=items(items(whole(0, 9), 2, 2), 2, 2)),
    items(BOOLEAN, 2, 5),
    items({"enum": [1, 2, 3]}, 2, 3, uniqueItems=True),
    {"type": "array", "prefixItems": [WORD, whole(0, 9)], "items": False, "minItems": 2},
    {
        "type": "object",
        "properties": {"a": whole(0, 9), "b": WORD, "c": BOOLEAN},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": BOOLEAN},
        "additionalProperties": whole(0, 9),
        "maxProperties": 3,
    },
    {"type": "object", "patternProperties": {"^x[0-9]$": BOOLEAN}, "additionalProperties": False,
     "maxProperties": 2},
    {"anyOf": [an_object(cat=WORD), an_object(dog=whole(0, 9)), {"type": "null"}]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, WORD]},
    {"allOf": [{"type": "object", "properties": {"a": whole(0, 9)}, "required": ["a"]},
               {"properties": {"b": BOOLEAN}, "required": ["b"], "maxProperties": 2}]},
]  # fmt: skip
TREE: Schema = {
    "$defs": {
        "tree": an_object(
            value=whole(0, 9),
            children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
        )
    },
    "$ref": "#/$defs/tree",
}
CHAIN: Schema = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": whole(0, 3)},
    "required": ["n", "next"],
    "additionalProperties": False,
}
EXPRESSION: Schema = {
    "$defs": {
        "expression": {
            "anyOf": [
                whole(0, 99),
                an_object(
                    operator={"enum": ["+", "-", "÷"]},
                    left=whole(0, 9),
                    right={"$ref": "#/$defs/expression"},
                ),
            ]
        }
    },
    "$ref": "#/$defs/expression",
}
SHARED: Schema = {
    "definitions": {"money": an_object(amount=whole(0, 999), currency={"enum": ["€", "$", "¥"]})},
    **an_object(price={"$ref": "#/definitions/money"}, tax={"$ref": "#/definitions/money"}),
}
SCHEMAS: list[Schema] = [
    *SCALARS,
    *CONTAINERS,
    TREE,
    CHAIN,
    EXPRESSION,
    SHARED,
    *(
        an_object(left=left, right=right)
        for left, right in zip(SCALARS[::2], SCALARS[1::2], strict=True)
    ),
    *(items(schema, 1, 2) for schema in CONTAINERS[:6]),
]
