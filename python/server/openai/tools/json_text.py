"""JSON inside a growing text: where a value ends, and the head of a call.

Checks no more than it needs to find the end: what a model wrote is handed on as it wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from trunkline.server.openai.incremental import Emit, Parsing, Source, accept, fill, skip_space
from trunkline.server.openai.pieces import Piece

# What matters for the end of an object or array: a character outside strings, or inside one.
_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\]')
_SCALAR: Final = re.compile(r"[-+.\w]*")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_OTHER_KEYS: Final = ("type", "id", "index")


class Head(NamedTuple):
    """What stands in a call's object before its arguments' text is consumed.

    `early` are arguments that came before the name. With `has_arguments` the source stands right
    before the text of the arguments, an object; else the call's object has ended.
    """

    name: str
    early: str | None
    has_arguments: bool


def json_string(source: Source) -> Parsing[str | None]:
    """Consume a string; None if there is none, or no proper one."""
    if not (yield from accept(source, '"')):
        return None
    raw = ['"']
    while True:
        found = _INSIDE.search(source.text)
        if found is None:
            raw.append(source.take(len(source.text)))
            if source.ended:
                return None
            yield None
            continue
        position = found.end()
        if found.group() == "\\":
            if not (yield from fill(source, position + 1)):
                return None
            raw.append(source.take(position + 1))
            continue
        raw.append(source.take(position))
        break
    try:
        value = str(json.loads("".join(raw), strict=False))
        value.encode()  # a lone surrogate is no text
    except ValueError:
        return None
    return value


def json_nested(source: Source, emit: Emit) -> Parsing[bool]:
    """Hand on an object or array, at whose opening bracket the source stands, as it is written.

    Brackets inside strings do not count; which kind closes which is not checked.

    Returns:
        Whether it ended before the text did.
    """
    depth, inside = 0, False
    while True:
        position, text = 0, source.text
        while True:
            found = (_INSIDE if inside else _OUTSIDE).search(text, position)
            if found is None:
                position = len(text)
                break
            char, position = found.group(), found.end()
            if char == '"':
                inside = not inside
            elif char == "\\":
                if position == len(text):  # what it escapes has not come yet
                    position -= 1
                    break
                position += 1
            else:
                depth += 1 if char in "{[" else -1
                if depth == 0:
                    yield from emit(source.take(position))
                    return True
        if source.ended:
            yield from emit(source.take(len(text)))
            return False
        yield from emit(source.take(position))
        yield None


def json_value(source: Source) -> Parsing[str | None]:
    """Consume any value; its text, None if there is none or the text ends within."""
    if not (yield from fill(source, 1)):
        return None
    first = source.text[0]
    if first == '"':
        value = yield from json_string(source)
        return None if value is None else json.dumps(value, ensure_ascii=False)
    if first in "{[":
        parts: list[str] = []

        def collect(text: str) -> Iterable[Piece]:
            parts.append(text)
            return ()

        return "".join(parts) if (yield from json_nested(source, collect)) else None
    scalar = ""
    while True:
        matched = _SCALAR.match(source.text)
        scalar += source.take(matched.end() if matched else 0)
        if source.text or source.ended:
            return scalar or None
        yield None


def call_head(source: Source) -> Parsing[Head | None]:
    """Read `{"name": ..., "arguments": ...}` up to the arguments; None if it is no call.

    The keys may come in any order, `parameters` stands for `arguments`, and `type`, `id` and
    `index` are passed over. What was consumed by then is in the source's record.
    """
    if not (yield from accept(source, "{")):
        return None
    name: str | None = None
    early: str | None = None
    while True:
        key = yield from _key(source)
        if key == "name":
            name = yield from json_string(source)
        elif key in _ARGUMENT_KEYS:
            if name and early is None and (yield from at_object(source)):
                return Head(name, None, has_arguments=True)
            early = yield from _whole_arguments(source)
        elif key not in _OTHER_KEYS or (yield from json_value(source)) is None:
            return None
        if (key == "name" and not name) or (key in _ARGUMENT_KEYS and early is None):
            return None
        yield from skip_space(source)
        if not (yield from accept(source, ",")):
            break
    if name is None or not (yield from accept(source, "}")):
        return None
    return Head(name, early or "{}", has_arguments=False)


def rest_of_call(source: Source) -> Parsing[None]:
    """Consume what follows the arguments in a call's object, and its end, as far as it is there."""
    while True:
        yield from skip_space(source)
        if (yield from accept(source, "}")) or not (yield from accept(source, ",")):
            return
        if (yield from _key(source)) is None or (yield from json_value(source)) is None:
            return


def _key(source: Source) -> Parsing[str | None]:
    yield from skip_space(source)
    key = yield from json_string(source)
    yield from skip_space(source)
    if key is None or not (yield from accept(source, ":")):
        return None
    yield from skip_space(source)
    return key


def at_object(source: Source) -> Parsing[bool]:
    """Whether an object begins here."""
    return (yield from fill(source, 1)) and source.text[0] == "{"


def _whole_arguments(source: Source) -> Parsing[str | None]:
    """Arguments as an object, as null, or as a string that holds an object's text."""
    text = yield from json_value(source)
    if text is None or text == "null":
        return None if text is None else "{}"
    if text.startswith('"'):
        text = str(json.loads(text))
        return text if is_object(text) else None
    return text if text.startswith("{") else None


def is_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(parsed(text), dict)
    except ValueError:
        return False


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("too deep") from error


def written(value: Any) -> str:
    """The JSON text of a value; ASCII only if it holds lone surrogates.

    Raises:
        ValueError, TypeError: JSON has no such value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
