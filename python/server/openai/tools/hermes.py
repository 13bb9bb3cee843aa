"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>` around a JSON object, once per call."""

from __future__ import annotations

from typing import Final

from trunkline.server.openai.incremental import Parsing, Source, accept, skip_space, until
from trunkline.server.openai.tools.base import CallParser

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesParser(CallParser):
    """Reads `<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""

    markers = (_BEGIN, _END)
    example = '<tool_call>\n{"name": "function_name", "arguments": {"key": "value"}}\n</tool_call>'

    def _parse(self, source: Source) -> Parsing[None]:
        while not self._is_full and (yield from until(source, (_BEGIN,), self._content)):
            source.record(_BEGIN)
            yield from skip_space(source)
            if (yield from self._json_call(source)):
                yield from skip_space(source)
                yield from accept(source, _END)
