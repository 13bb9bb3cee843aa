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
)
from trunkline.server.openai.tools.base import SectionParser
from trunkline.server.openai.tools.parameters import ArgumentsText

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


class Qwen3CoderParser(SectionParser):
    """Reads `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`."""

    section_begin, call_begin = _BEGIN, _FUNCTION
    markers = (_BEGIN, _END)
    example = (
        f"{_BEGIN}\n{_FUNCTION}function_name>\n{_PARAMETER}key>\nvalue\n{_PARAMETER_END}\n"
        f"{_FUNCTION_END}\n{_END}"
    )

    def _call(self, source: Source) -> Parsing[None]:
        """A name, and arguments up to the call's end; one that is cut off is left out."""
        name, _ = yield from text_until(source, (">", "\n"))
        name = name.strip()
        if not self._knows(name):
            yield from self._content(source.recorded())
            return
        source.recorded()
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
