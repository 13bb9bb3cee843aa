"""Small parts of JSON schemas."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def nullable(schema: Schema) -> Schema:
    """The same schema, with null allowed."""
    kinds = schema.get("anyOf")
    if kinds is not None and set(schema) == {"anyOf"}:
        return schema if {"type": "null"} in kinds else {"anyOf": [*kinds, {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


def object_of(required: Schema, others: Schema | None = None) -> Schema:
    """An object with these properties; of the others any may be null."""
    optional = {name: nullable(schema) for name, schema in (others or {}).items()}
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": list(required)}


def list_of(items: Schema, **bounds: int) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **bounds}
