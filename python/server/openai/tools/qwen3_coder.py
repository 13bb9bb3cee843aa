"""Qwen3-Coder and Qwen 3.5: `<function=name>` with one `<parameter=key>` per argument.

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
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


class Qwen3CoderParser(CallParser):
    """Reads `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`."""

    markers = (_BEGIN, _END)
    example = (
        f"{_BEGIN}\n{_FUNCTION}function_name>\n{_PARAMETER}key>\nvalue\n{_PARAMETER_END}\n"
        f"{_FUNCTION_END}\n{_END}"
    )

    def _parse(self, source: Source) -> Parsing[None]:
        while not self._is_full and (
            mark := (yield from until(source, (_BEGIN, _FUNCTION), self._content))
        ):
            source.record(mark)
            if mark == _BEGIN:
                yield from skip_space(source)
                if not (yield from accept(source, _FUNCTION)):
                    yield from self._content(source.recorded())
                    continue
            name, _ = yield from text_until(source, (">", "\n"))
            if not self._knows(name.strip()):
                yield from self._content(source.recorded())
                continue
            source.recorded()
            yield from self._call(source, name.strip())

    def _call(self, source: Source, name: str) -> Parsing[None]:
        """Arguments up to the call's end; one that is cut off is left out."""
        yield from self._begin(name)
        arguments = ArgumentsText(self._calls.schemas[name])
        yield from skip_space(source)
        while (yield from accept(source, _PARAMETER)):
            key, _ = yield from text_until(source, (">",))
            value, end = yield from text_until(source, (_PARAMETER_END,))
            if end is None:
                return
            value = value.removeprefix("\n").removesuffix("\n")
            yield from self._arguments(arguments.add(key.strip(), value))
            yield from skip_space(source)
        if not (yield from accept(source, _FUNCTION_END)) and source.ended:
            return
        yield from self._arguments(arguments.close())
        yield from skip_space(source)
        yield from accept(source, _END)
