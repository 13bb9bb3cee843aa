"""Pythonic calls, as Llama 4, Llama 3.2 and LFM2 write them: `[f(x=1), g(y="two")]`.

With `<|python_start|>` and `<|python_end|>`, or `<|tool_call_start|>` and `<|tool_call_end|>`,
around them or not. A call is handed on when all of it is there.
"""

from __future__ import annotations

from typing import Final

from trunkline.server.openai.incremental import Parsing, Source, accept, skip_space, until
from trunkline.server.openai.tools.base import CallParser
from trunkline.server.openai.tools.python_text import python_call

_STARTS: Final = ("<|python_start|>", "<|tool_call_start|>")
_ENDS: Final = ("<|python_end|>", "<|tool_call_end|>")


class PythonicParser(CallParser):
    """Reads `[f(key="value")]`."""

    markers = (*_STARTS, *_ENDS)
    example = '[function_name(key="value")]'

    def _parse(self, source: Source) -> Parsing[None]:
        marks = (*_STARTS, "[")
        while not self._is_full and (mark := (yield from until(source, marks, self._content))):
            source.record(mark)
            yield from skip_space(source)
            is_open = mark == "[" or (yield from accept(source, "["))
            if is_open and (yield from self._list(source)):
                yield from self._close(source)
            else:
                yield from self._content(source.recorded())

    def _list(self, source: Source) -> Parsing[bool]:
        """Calls up to the closing bracket; False if not even the first is one."""
        count = self._count
        while True:
            yield from skip_space(source)
            call = yield from python_call(source)
            if call is None or not self._knows(call.name) or self._is_full:
                if self._count > count:
                    yield from self._content(source.recorded())
                return self._count > count
            source.recorded()
            yield from self._begin(call.name)
            yield from self._arguments(call.arguments)
            source.record()
            yield from skip_space(source)
            if not (yield from accept(source, ",")):
                if (yield from accept(source, "]")):
                    source.recorded()
                else:
                    yield from self._content(source.recorded())
                return True

    def _close(self, source: Source) -> Parsing[None]:
        """Consume the end of a section, if there is one."""
        source.record()
        yield from skip_space(source)
        for end in _ENDS:
            if (yield from accept(source, end)):
                source.recorded()
                return
        yield from self._content(source.recorded())
