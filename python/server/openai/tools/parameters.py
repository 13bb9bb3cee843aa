"""Arguments that a format writes one by one, as text: which JSON values they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from trunkline.server.openai.tools.json_text import parsed, written

_PYTHON_WORDS: Final[Mapping[str, bool | None]] = {"True": True, "False": False, "None": None}

_MAX_DEPTH: Final = 8  # of rules that name rules


def argument(schema: Mapping[str, Any], key: str, text: str) -> str:
    """The JSON text of the argument `key`, given as text.

    It stays a string where the schema says that it is one; else it is the JSON that the text
    holds, if it holds any that the schema's types allow.
    """
    kinds = _kinds(schema, key)
    if kinds == {"string"}:
        return written(text)
    try:
        value = parsed(text)
    except ValueError:
        value = _PYTHON_WORDS.get(text.strip(), text)
    if isinstance(value, str) or ("string" in kinds and _kind(value) not in kinds):
        return written(text)
    return written(value)


def _kinds(schema: Mapping[str, Any], key: str) -> set[str]:
    """The types that a schema names for a property; empty where it names none."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return set()
    return set(_named(properties.get(key), schema, _MAX_DEPTH))


def _named(rule: Any, schema: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Types that a rule of a schema names itself, by its values, or by other rules."""
    if not isinstance(rule, Mapping) or depth == 0:
        return
    kinds = rule.get("type")
    yield from (kind for kind in _listed(kinds) or [kinds] if isinstance(kind, str))
    for value in [rule["const"]] if "const" in rule else _listed(rule.get("enum")):
        yield _kind(value)
    for word in ("anyOf", "oneOf", "allOf"):
        for one in _listed(rule.get(word)):
            yield from _named(one, schema, depth - 1)
    match str(rule.get("$ref")).split("/"):
        case ["#", "$defs" | "definitions" as place, name]:
            shared = schema.get(place)
            if isinstance(shared, Mapping):
                yield from _named(shared.get(name), schema, depth - 1)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"


class ArgumentsText:
    """The JSON text of a call's arguments, piece by piece."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._keys: set[str] = set()

    def add(self, key: str, text: str) -> str:
        """One more argument, given as text; nothing if it is there already."""
        if key in self._keys:
            return ""
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        return f"{opening}{written(key)}: {argument(self._schema, key, text)}"

    def close(self) -> str:
        """The end."""
        return "}" if self._keys else "{}"
