"""GLM 4.5 to 4.7: `<tool_call>name` with one `<arg_key>` and `<arg_value>` per argument.

Each argument is handed on when all of it is there. What it is in JSON, the tool's schema says.
"""

from __future__ import annotations

from typing import Final

from trunkline.server.openai.incremental import (
    Parsing,
    Source,
    accept,
    skip_space,
    text_until,
    until,
)
from trunkline.server.openai.tools.base import CallParser
from trunkline.server.openai.tools.parameters import ArgumentsText

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"


class GlmParser(CallParser):
    """Reads `<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    markers = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    example = f"{_BEGIN}function_name{_KEY}key{_KEY_END}{_VALUE}value{_VALUE_END}{_END}"

    def _parse(self, source: Source) -> Parsing[None]:
        while not self._is_full and (yield from until(source, (_BEGIN,), self._content)):
            source.record(_BEGIN)
            name, mark = yield from text_until(source, (_KEY, _END), consume=False)
            name = name.strip()
            if mark is None or not self._knows(name):
                yield from self._content(source.recorded())
            else:
                source.recorded()
                yield from self._call(source, name)

    def _call(self, source: Source, name: str) -> Parsing[None]:
        """Arguments up to the call's end; one that is cut off is left out."""
        yield from self._begin(name)
        arguments = ArgumentsText(self._calls.schemas[name])
        while (yield from accept(source, _KEY)):
            key, _ = yield from text_until(source, (_KEY_END,))
            yield from skip_space(source)
            yield from accept(source, _VALUE)
            value, end = yield from text_until(source, (_VALUE_END,))
            if end is None:
                return
            yield from self._arguments(arguments.add(key.strip(), value))
            yield from skip_space(source)
        if (yield from accept(source, _END)) or not source.ended:
            yield from self._arguments(arguments.close())
