"""Structural tags of arguments that a format writes one by one, between tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

_DESCRIBED: Final = frozenset(
    "type properties required additionalProperties title description $schema $defs definitions "
    "$id default examples".split()
)
_NOTES: Final = frozenset("title description default examples".split())


def xml_parameters(
    schema: Mapping[str, Any],
    opening: Callable[[str], list[dict[str, Any]]],
    closing: list[dict[str, Any]],
) -> list[dict[str, Any]] | None:
    """One element per property: its value as plain text if it is a string, else as JSON.

    Args:
        schema: of an object.
        opening: what stands before a key's value.
        closing: what stands after a value; if it begins with text, no value holds that.

    Returns:
        None where such elements cannot say what the schema does: it is no plain list of
        properties, or one of them is text with rules of its own.
    """
    properties = schema.get("properties", {})
    required = set(schema.get("required", []))
    if not _DESCRIBED.issuperset(schema) or not required.issubset(properties):
        return None
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    end = closing[0]["value"].strip() if closing[0]["type"] == "const_string" else None
    elements = []
    for key, rule in properties.items():
        if any(char in key for char in "<>\n\0") or key != key.strip():
            return None
        value = _value(rule, shared, end)
        if value is None:
            return None
        element = {"type": "sequence", "elements": [*opening(key), value, *closing]}
        elements.append(element if key in required else {"type": "optional", "content": element})
    return elements


def _value(rule: Any, shared: Mapping[str, Any], end: str | None) -> dict[str, Any] | None:
    if not isinstance(rule, Mapping):
        return None
    kind = rule.get("type")
    keys = set(rule) - _NOTES
    if kind == "string" and keys == {"type"}:
        return {"type": "any_text", "excludes": [] if end is None else [end]}
    values = rule.get("enum", [rule["const"]] if "const" in rule else None)
    if isinstance(values, list) and values and keys <= {"type", "enum", "const"}:
        if all(isinstance(one, str) and (end is None or end not in one) for one in values):
            texts = [{"type": "const_string", "value": one} for one in values]
            return {"type": "or", "elements": texts} if len(texts) > 1 else texts[0]
    if kind in ("integer", "number", "boolean", "null", "array", "object"):
        return {"type": "json_schema", "json_schema": {**shared, **rule}}
    return None
