"""The content blocks of a message, written from pieces, and the events that tell of them.

Whole answers and streams come from the same writer: a whole answer is what is left when the events
are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import orjson

from trunkline.server.openai.pieces import Arguments, Content, Piece, Reasoning, ToolCall

Event: TypeAlias = dict[str, Any]

_DELTA: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class _Block:
    """One content block while it grows."""

    def __init__(self, kind: str, index: int, call: ToolCall | None = None) -> None:
        self.kind = kind
        self.index = index
        self.call = call
        self.texts: list[str] = []

    def content(self) -> Event:
        """The block as clients see it."""
        text = "".join(self.texts)
        if self.call is not None:
            arguments = _arguments(text)
            return {
                "type": "tool_use",
                "id": self.call.id,
                "name": self.call.name,
                "input": arguments,
            }
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text, "citations": None}


class ContentWriter:
    """Turns the pieces of one sample into content blocks and events."""

    def __init__(self) -> None:
        self.blocks: list[Event] = []
        self._open: _Block | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether a block calls a tool."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        """Take pieces."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content():
                    events += self._more("text", piece.text)
                case Reasoning():
                    events += self._more("thinking", piece.text)
                case ToolCall():
                    events += self._switch("tool_use", piece)
                case Arguments():
                    events += self._arguments(piece)
        return events

    def close(self) -> list[Event]:
        """Nothing more comes. There is at least one block then."""
        events: list[Event] = []
        if self._open is None and not self.blocks:
            events = self._switch("text")
        return events + self._close()

    def _more(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = self._switch(kind)
        assert self._open is not None
        return [*events, self._delta(self._open, text)]

    def _arguments(self, piece: Arguments) -> list[Event]:
        block = self._open
        if block is None or block.call is None or block.call.index != piece.index:
            raise RuntimeError(f"arguments of tool call {piece.index} came outside of it")
        return [self._delta(block, piece.text)]

    def _delta(self, block: _Block, text: str) -> Event:
        block.texts.append(text)
        kind, field = _DELTA[block.kind]
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _switch(self, kind: str, call: ToolCall | None = None) -> list[Event]:
        events = self._close()
        block = self._open = _Block(kind, len(self.blocks), call)
        start = {
            "type": "content_block_start",
            "index": block.index,
            "content_block": block.content(),
        }
        return [*events, start]

    def _close(self) -> list[Event]:
        block = self._open
        if block is None:
            return []
        self._open = None
        self.blocks.append(block.content())
        return [{"type": "content_block_stop", "index": block.index}]


def _arguments(text: str) -> dict[str, Any]:
    """The input of a tool call; text that is no JSON object stands in one, so that it is seen."""
    if not text:
        return {}
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}
