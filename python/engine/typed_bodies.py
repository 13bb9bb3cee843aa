"""Decoded JSON -> typed bodies, and what to say of one that does not fit its type."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Final, TypeVar

import msgspec

from trunkline.engine.suggestions import did_you_mean
from trunkline.engine.validation import RequestError, shown

Body = TypeVar("Body", bound=msgspec.Struct)

_WORDS: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}
_FIELD: Final = re.compile(r"Object (missing required|contains unknown) field `(.*)`")
_TYPE: Final = re.compile(r"Expected `(.*)`, got `(.*)`")
_STEP: Final = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")
_NOT_FOUND: Final = object()


def convert(body: Any, kind: type[Body]) -> Body:
    """The typed form of a decoded JSON document.

    Raises:
        RequestError: a field is missing, of another type or, where `kind` says so, unknown; the
            message names field, value and what it must be.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), body, kind) from error


def _refusal(error: str, body: Any, kind: type[msgspec.Struct]) -> RequestError:
    words, _, path = error.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if match := _FIELD.fullmatch(words):
        name = f"{path}.{match[2]}" if path else match[2]
        if match[1] == "missing required":
            return RequestError(f"{name} must be given.", name)
        close = "" if path else did_you_mean(name, kind.__struct_fields__)
        return RequestError(f"{name} is no field of this body{close or '.'}", name)
    subject, value = path or "the body", _value_at(body, path)
    if match := _TYPE.fullmatch(words):
        wanted = " or ".join(_WORDS.get(one, one) for one in match[1].split(" | ") if one != "null")
        got = _WORDS.get(match[2], match[2]) if value is _NOT_FOUND else shown(value)
        return RequestError(f"{subject} must be {wanted}, got {got}.", path or None)
    if choices := _choices(kind, path):
        return RequestError(
            f"{subject} must be one of {', '.join(choices)}, got {shown(value)}.", path
        )
    return RequestError(f"{subject}: {words}.", path or None)


def _value_at(document: Any, path: str) -> Any:
    """The value at a path such as `messages[0].role`; `[...]` stands for any key of an object."""
    for name, index, any_key in _STEP.findall(path):
        if any_key:
            return _NOT_FOUND
        try:
            document = document[int(index) if index else name]
        except (LookupError, TypeError):
            return _NOT_FOUND
    return document


def _choices(kind: type[msgspec.Struct], name: str) -> list[str]:
    """What a field may be that has a few words for values; empty for others."""
    annotation = typing.get_type_hints(kind).get(name)
    unions = (types.UnionType, typing.Union)
    parts = typing.get_args(annotation) if typing.get_origin(annotation) in unions else [annotation]
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return [str(word) for part in literals for word in typing.get_args(part)]
