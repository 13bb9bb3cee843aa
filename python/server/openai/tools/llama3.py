"""Llama 3.1 to 3.3: the answer is a JSON object, or several that `;` divides.

`<|python_tag|>` may stand before it. For the tools that Meta calls built in the model writes
`<|python_tag|>tool.call(key="value")` instead.
"""

from __future__ import annotations

from typing import Final

from trunkline.server.openai.incremental import Parsing, Source, accept, skip_space, until
from trunkline.server.openai.tools.base import CallParser
from trunkline.server.openai.tools.json_text import at_object
from trunkline.server.openai.tools.python_text import python_call

_TAG: Final = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Reads `{"name": "f", "parameters": {}}`."""

    markers = (_TAG,)
    example = '{"name": "function_name", "parameters": {"key": "value"}}'

    def _parse(self, source: Source) -> Parsing[None]:
        yield from self._content((yield from skip_space(source)))
        source.record()
        if (yield from at_object(source)):
            yield from self._calls_from_here(source)
        source.recorded()
        while not self._is_full and (yield from until(source, self.markers, self._content)):
            source.record(_TAG)
            yield from skip_space(source)
            if (yield from at_object(source)):
                yield from self._calls_from_here(source)
            else:
                yield from self._built_in(source)

    def _calls_from_here(self, source: Source) -> Parsing[None]:
        """One object after the other, as long as they are calls."""
        while (yield from self._json_call(source)) and not self._is_full:
            source.record()
            yield from skip_space(source)
            if (yield from accept(source, ";")):
                yield from skip_space(source)
            yield from accept(source, _TAG)
            if not (yield from at_object(source)):
                yield from self._content(source.recorded())
                return

    def _built_in(self, source: Source) -> Parsing[None]:
        call = yield from python_call(source)
        name = call.name.removesuffix(".call") if call else ""
        if call is None or not self._knows(name):
            yield from self._content(source.recorded())
            return
        source.recorded()
        yield from self._begin(name)
        yield from self._arguments(call.arguments)
