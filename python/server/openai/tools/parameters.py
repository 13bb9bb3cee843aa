"""Arguments that a format writes one by one, as text: which JSON values they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from trunkline.server.openai.tools.json_text import parsed, written

_PYTHON_WORDS: Final[Mapping[str, bool | None]] = {"True": True, "False": False, "None": None}


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
    return set(_named(properties.get(key))) if isinstance(properties, Mapping) else set()


def _named(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    for value in [schema["const"]] if "const" in schema else schema.get("enum") or []:
        yield _kind(value)
    for word in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(word) or []:
            yield from _named(one)


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
