"""Kimi K2: a section of calls, each with an id that holds its name: `functions.name:0`."""

from __future__ import annotations

from typing import Final

from trunkline.server.openai.incremental import (
    Parsing,
    Source,
    accept,
    fill,
    skip_space,
    text_until,
)
from trunkline.server.openai.tools.base import SectionParser

_BEGIN: Final = "<|tool_calls_section_begin|>"
_END: Final = "<|tool_calls_section_end|>"
_CALL_BEGIN: Final = "<|tool_call_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"


class KimiK2Parser(SectionParser):
    """Reads `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>`."""

    section_begin, call_begin = _BEGIN, _CALL_BEGIN
    markers = (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _ARGUMENTS)
    interrupts_reasoning = (_BEGIN,)
    example = (
        f"{_BEGIN}{_CALL_BEGIN}functions.function_name:0{_ARGUMENTS}"
        f'{{"key": "value"}}{_CALL_END}{_END}'
    )

    def _call(self, source: Source) -> Parsing[None]:
        call_id, marker = yield from text_until(source, (_ARGUMENTS, _CALL_END))
        yield from skip_space(source)
        name = self._name(call_id.strip())
        is_object = marker == _ARGUMENTS and (yield from fill(source, 1))
        if name is None or not is_object or source.text[0] != "{":
            yield from self._content(source.recorded())
            return
        yield from self._json_arguments(source, name)
        for end in (_CALL_END, _END):
            yield from skip_space(source)
            yield from accept(source, end)

    def _name(self, call_id: str) -> str | None:
        """The name in `functions.name:0`, or in what models make of it."""
        bare = call_id.removeprefix("functions.")
        return next((one for one in (bare.rpartition(":")[0], bare) if self._knows(one)), None)
