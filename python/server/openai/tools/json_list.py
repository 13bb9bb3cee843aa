"""A JSON list of calls and nothing else: `[{"name": "f", "parameters": {}}]`.

What the engine makes any model write where a call is required and the model's own format cannot be
described by a grammar.
"""

from __future__ import annotations

from trunkline.server.openai.incremental import Parsing, Source, accept, skip_space
from trunkline.server.openai.tools.base import CallParser


class JsonListParser(CallParser):
    """Reads `[{"name": "f", "parameters": {}}]`."""

    example = '[{"name": "function_name", "parameters": {"key": "value"}}]'

    def _parse(self, source: Source) -> Parsing[None]:
        source.record()
        yield from skip_space(source)
        if not (yield from accept(source, "[")):
            yield from self._content(source.recorded())
            return
        while (yield from self._json_call(source)):
            source.record()
            yield from skip_space(source)
            if not self._is_full and (yield from accept(source, ",")):
                yield from skip_space(source)
                continue
            if (yield from accept(source, "]")):
                source.recorded()
            else:
                yield from self._content(source.recorded())
            return
