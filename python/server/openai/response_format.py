"""The `response_format` of chat completions and completions -> `GrammarSpec`."""

from __future__ import annotations

from typing import Any, Final

from trunkline.engine.grammar.parameters import Wrong, document_grammar
from trunkline.engine.messages import GrammarSpec
from trunkline.engine.validation import RequestError, shown

NAME: Final = "response_format"
_KINDS: Final = ("text", "json_object", "json_schema", "structural_tag")


def parse_response_format(value: Any, max_chars: int) -> GrammarSpec | None:
    """What an output must be; None: anything.

    Raises:
        RequestError: the value is malformed.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{NAME} must be an object, got {shown(value)}.", NAME)
    kind = value.get("type")
    if kind not in _KINDS:
        raise RequestError(
            f"{NAME}.type must be one of {', '.join(_KINDS)}, got {shown(kind)}.", f"{NAME}.type"
        )
    if kind == "structural_tag":
        return _accepted(document_grammar("structural_tag", NAME, value, max_chars))
    unknown = sorted(value.keys() - {"type", "json_schema"})
    if unknown:
        raise RequestError(
            f"{NAME} has an unknown key {shown(unknown[0])}; it takes type and json_schema, and "
            "that takes schema.",
            NAME,
        )
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"), max_chars)
    if value.get("json_schema") is not None:
        raise RequestError(f"{NAME}.json_schema needs the type json_schema.", NAME)
    return None if kind == "text" else GrammarSpec("json_object")


def _json_schema(value: Any, max_chars: int) -> GrammarSpec:
    """The schema in its envelope of name, description and strict, which have no effect."""
    name = f"{NAME}.json_schema"
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object with a schema, got {shown(value)}.", name)
    unknown = sorted(value.keys() - {"name", "description", "schema", "strict"})
    if unknown:
        raise RequestError(
            f"{name} has an unknown key {shown(unknown[0])}; it takes name, description, schema "
            "and strict.",
            name,
        )
    for key, type_, words in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        given = value.get(key)
        if given is not None and not isinstance(given, type_):
            raise RequestError(f"{name}.{key} must be {words}, got {shown(given)}.", name)
    schema = value.get("schema")
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"{name}.schema must be a JSON Schema (an object), got {shown(schema)}.",
            f"{name}.schema",
        )
    return _accepted(document_grammar("json_schema", f"{name}.schema", schema, max_chars))


def _accepted(grammar: GrammarSpec | Wrong) -> GrammarSpec:
    if isinstance(grammar, Wrong):
        raise RequestError(grammar.message, grammar.name)
    return grammar
