"""gpt-oss (harmony): messages on channels, with reasoning and calls in one format.

`analysis` is reasoning, `final` is content, and so is `commentary` unless it has a recipient
`functions.name`: then it is a call. Text outside messages is content: output without channels is
an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from trunkline.server.openai.incremental import (
    Emit,
    Parsing,
    Source,
    fill,
    skip_space,
    starts_with,
    text_until,
    until,
)
from trunkline.server.openai.pieces import Piece, Reasoning
from trunkline.server.openai.tools.base import CallParser

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_CONSTRAIN: Final = "<|constrain|>"
_MESSAGE: Final = "<|message|>"
_END: Final = "<|end|>"
_CALL: Final = "<|call|>"
_RETURN: Final = "<|return|>"
_ENDS: Final = (_END, _CALL, _RETURN)
_TO: Final = " to="
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class GptOssParser(CallParser):
    """Reads `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>`."""

    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
    example = (
        f"{_CHANNEL}commentary to=functions.function_name {_CONSTRAIN}json{_MESSAGE}"
        f'{{"key": "value"}}{_CALL}'
    )

    def _parse(self, source: Source) -> Parsing[None]:
        if (yield from starts_with(source, _TO)):  # the prompt holds what comes before
            source.record()
            yield from self._header(source, "")
        while (mark := (yield from until(source, (_START, _CHANNEL), self._content))) is not None:
            source.record(mark)
            yield from self._header(source, mark)

    def _header(self, source: Source, mark: str) -> Parsing[None]:
        """A message from its header on."""
        header, end = yield from text_until(source, (_MESSAGE, *_ENDS))
        if end != _MESSAGE:
            yield from self._content(source.recorded())
            return
        header = mark + header
        recipient = _RECIPIENT.search(header)
        name = recipient.group(1) if recipient else None
        if name is not None and self._knows(name) and not self._is_full:
            yield from self._call(source, name)
        elif header.partition(_CHANNEL)[2].strip().startswith("analysis"):
            source.recorded()
            yield from self._body(source, _reasoning)
        elif name is not None:
            yield from self._content(source.recorded())
        else:
            source.recorded()
            if self._has_content:
                yield from self._content("\n\n")
            yield from self._body(source, self._content)

    def _call(self, source: Source, name: str) -> Parsing[None]:
        yield from skip_space(source)
        if not (yield from fill(source, 1)) or source.text[0] != "{":
            yield from self._content(source.recorded())
            return
        yield from self._json_arguments(source, name)
        yield from self._body(source, _nothing)

    def _body(self, source: Source, emit: Emit) -> Parsing[None]:
        """The rest of a message, and its end."""
        end = yield from until(source, (*_ENDS, _START, _CHANNEL), emit, consume=False)
        if end in _ENDS:
            source.take(len(end))


def _nothing(_: str) -> Iterator[Piece]:
    return iter(())


def _reasoning(text: str) -> Iterator[Piece]:
    if text:
        yield Reasoning(text)
