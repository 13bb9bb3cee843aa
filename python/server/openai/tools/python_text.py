"""A Python call inside a growing text: `name(key="value")`, with literals only."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from trunkline.server.openai.incremental import Parsing, Source
from trunkline.server.openai.tools.json_text import written

_WORD: Final = re.compile(r"[\w.\-]*")
# Models write JSON's words too.
_WORDS: Final[Mapping[str, bool | None]] = {"true": True, "false": False, "null": None}


class PythonCall(NamedTuple):
    """A call that was read whole; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


def python_call(source: Source, prefix: str = "") -> Parsing[PythonCall | None]:
    """Consume a call; None if there is none, or one that is not made of keywords and literals."""
    name = prefix
    while True:
        matched = _WORD.match(source.text)
        name += source.take(matched.end() if matched else 0)
        if source.text or source.ended:
            break
        yield None
    if not name or not source.text.startswith("("):
        return None
    text = yield from _parenthesised(source)
    arguments = None if text is None else _evaluated(text)
    return None if arguments is None else PythonCall(name, arguments)


def _parenthesised(source: Source) -> Parsing[str | None]:
    """Consume from a bracket to the one that closes it, past those in strings.

    Line breaks in strings, which models write as they are, come out as Python spells them.
    """
    depth, quote, escaped = 0, "", False
    parts: list[str] = []
    while True:
        for position, char in enumerate(source.text):
            is_escaped, escaped = escaped, False
            if quote and not is_escaped:
                escaped = char == "\\"
                quote = "" if char == quote else quote
            elif not quote and char in "\"'":
                quote = char
            elif not quote and char in "([{)]}":
                depth += 1 if char in "([{" else -1
                if depth == 0:
                    source.take(position + 1)
                    return "".join([*parts, char])
            parts.append("\\n" if char == "\n" and quote and not is_escaped else char)
        source.take(len(source.text))
        if source.ended:
            return None
        yield None


def _evaluated(text: str) -> str | None:
    """The arguments of `(key=literal, ...)` as JSON."""
    try:
        call = _Words().visit(ast.parse(f"f{text}", mode="eval").body)
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        return written({one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg})
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


class _Words(ast.NodeTransformer):
    """JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node
