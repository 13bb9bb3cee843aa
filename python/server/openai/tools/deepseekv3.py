"""DeepSeek V3, R1 and V3.1.

V3 writes `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line break and the arguments in a
```json block; V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>` and the arguments.
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
)
from trunkline.server.openai.tools.base import SectionParser

_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_END: Final = "<｜tool▁calls▁end｜>"
_CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"


class DeepSeekV3Parser(SectionParser):
    """Reads both versions."""

    section_begin, call_begin = _BEGIN, _CALL_BEGIN
    markers = (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _SEPARATOR)
    interrupts_reasoning = (_BEGIN,)
    example = f'{_BEGIN}{_CALL_BEGIN}function_name{_SEPARATOR}{{"key": "value"}}{_CALL_END}{_END}'

    def _call(self, source: Source) -> Parsing[None]:
        name, _ = yield from text_until(source, (_SEPARATOR, "\n"))
        if not ((yield from fill(source, 1)) and source.text[0] == "{"):
            name, _ = yield from text_until(source, ("\n", _CALL_END))
            yield from skip_space(source)
            if (yield from accept(source, _FENCE)):
                yield from accept(source, "json")
            yield from skip_space(source)
        name = name.strip()
        if not self._knows(name) or not ((yield from fill(source, 1)) and source.text[0] == "{"):
            yield from self._content(source.recorded())
            return
        yield from self._json_arguments(source, name)
        yield from skip_space(source)
        yield from accept(source, _FENCE)
        yield from skip_space(source)
        yield from accept(source, _CALL_END)
        yield from skip_space(source)
        yield from accept(source, _END)
