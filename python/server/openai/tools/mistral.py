"""Mistral: `[TOOL_CALLS]`, then a JSON list of calls (up to v7), or a name and arguments.

The newer form is `[TOOL_CALLS]f[ARGS]{...}` per call, with `[CALL_ID]...` before the arguments in
some versions, or nothing between name and arguments in others.
"""

from __future__ import annotations

from typing import Final

from trunkline.server.openai.incremental import (
    Parsing,
    Source,
    accept,
    fill,
    skip_space,
    text_until,
    until,
)
from trunkline.server.openai.tools.base import CallParser

_CALLS: Final = "[TOOL_CALLS]"
_ID: Final = "[CALL_ID]"
_ARGUMENTS: Final = "[ARGS]"


class MistralParser(CallParser):
    """Reads `[TOOL_CALLS][{"name": "f", "arguments": {}}]` and `[TOOL_CALLS]f[ARGS]{}`."""

    markers = (_CALLS, _ID, _ARGUMENTS)
    interrupts_reasoning = (_CALLS,)
    example = f'{_CALLS}[{{"name": "function_name", "arguments": {{"key": "value"}}}}]'

    def _parse(self, source: Source) -> Parsing[None]:
        while not self._is_full and (yield from until(source, (_CALLS,), self._content)):
            source.record(_CALLS)
            yield from skip_space(source)
            if (yield from accept(source, "[")):
                yield from self._list(source)
            elif (yield from fill(source, 1)) and source.text[0] == "{":
                yield from self._json_call(source)
            else:
                yield from self._named(source)

    def _list(self, source: Source) -> Parsing[None]:
        while True:
            yield from skip_space(source)
            if not (yield from self._json_call(source)):
                return
            source.record()
            yield from skip_space(source)
            if self._is_full or not (yield from accept(source, ",")):
                break
        if (yield from accept(source, "]")):
            source.recorded()
        else:
            yield from self._content(source.recorded())

    def _named(self, source: Source) -> Parsing[None]:
        """A name, and an object that the arguments are."""
        name, marker = yield from text_until(source, ("{", "\n"), consume=False)
        name = name.partition(_ID)[0].removesuffix(_ARGUMENTS).strip()
        if marker == "{" and self._knows(name):
            yield from self._json_arguments(source, name)
        else:
            yield from self._content(source.recorded())
