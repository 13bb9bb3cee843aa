"""The output items of a response, written from pieces, and the events that tell of them.

Whole answers and streams come from the same writer: a whole answer is what is left when the events
are thrown away.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from trunkline.server.openai.pieces import Arguments, Content, Piece, Reasoning, ToolCall

Event: TypeAlias = dict[str, Any]

_DELTA: Final = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_ID_PREFIX: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def new_id(prefix: str) -> str:
    """A fresh public id."""
    return f"{prefix}_{uuid.uuid4().hex}"


class _Item:
    """One output item while it grows."""

    def __init__(self, kind: str, index: int, call: ToolCall | None = None) -> None:
        self.kind = kind
        self.index = index
        self.call = call
        self.id = new_id(_ID_PREFIX[kind])
        self.texts: list[str] = []
        self.logprobs: list[Any] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> Event:
        """The only content part of a message or a reasoning item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def item(self, status: str, *, is_new: bool = False) -> Event:
        """The item as clients see it; a new one has no part yet."""
        head: Event = {"type": self.kind, "id": self.id, "status": status}
        if self.call is not None:
            return {
                **head,
                "call_id": self.call.id,
                "name": self.call.name,
                "arguments": self.text,
            }
        content = [] if is_new else [self.part()]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def place(self) -> Event:
        """What says in an event where its text belongs."""
        place: Event = {"item_id": self.id, "output_index": self.index}
        return place if self.call is not None else {**place, "content_index": 0}


class OutputWriter:
    """Turns the pieces of one sample into items and events.

    Events have no sequence number yet. Log-probs of tokens wait for the message that they belong
    to: text may be held back, and a splitter does not say which tokens made a piece, only how many
    at the beginning are reasoning.
    """

    def __init__(self) -> None:
        self._done: list[Event] = []
        self._open: _Item | None = None
        self._pending: list[Any] = []
        self._num_scored = 0
        self._num_reasoning = 0

    def items(self) -> list[Event]:
        """All items as they are now."""
        return [*self._done, *([self._open.item("in_progress")] if self._open else [])]

    def feed(
        self, pieces: Iterable[Piece], logprobs: Sequence[Any] = (), num_reasoning: int = 0
    ) -> list[Event]:
        """Take pieces, and the log-probs of the tokens that came with them.

        `num_reasoning` is how many of all tokens so far are reasoning.
        """
        self._pending += logprobs
        self._num_scored += len(logprobs)
        self._num_reasoning = num_reasoning
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content():
                    events += self._more("message", piece.text)
                case Reasoning():
                    events += self._more("reasoning", piece.text)
                case ToolCall():
                    events += self._switch("function_call", piece)
                case Arguments():
                    events += self._arguments(piece)
        return events

    def close(self, status: str) -> list[Event]:
        """Nothing more comes; the last item gets `status`. There is at least one item then."""
        events: list[Event] = []
        if self._open is None and not self._done:
            events += self._switch("message")
        if self._open is not None and self._open.kind == "message" and self._scored():
            events += self._delta(self._open, "")
        return events + self._close(status)

    def _more(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = self._switch(kind)
        assert self._open is not None
        return events + self._delta(self._open, text)

    def _arguments(self, piece: Arguments) -> list[Event]:
        item = self._open
        if item is None or item.call is None or item.call.index != piece.index:
            raise RuntimeError(f"arguments of tool call {piece.index} came outside of it")
        return self._delta(item, piece.text)

    def _delta(self, item: _Item, text: str) -> list[Event]:
        item.texts.append(text)
        event = {"type": f"{_DELTA[item.kind]}.delta", **item.place(), "delta": text}
        if item.kind == "message":
            event["logprobs"] = self._scored()
            item.logprobs += self._pending
            self._pending = []
        return [event]

    def _scored(self) -> list[Any]:
        """The log-probs that wait, without those of reasoning."""
        first = self._num_scored - len(self._pending)
        self._pending = self._pending[max(self._num_reasoning - first, 0) :]
        return self._pending

    def _switch(self, kind: str, call: ToolCall | None = None) -> list[Event]:
        """Close the open item and begin another."""
        events = self._close("completed")
        item = self._open = _Item(kind, len(self._done), call)
        events.append(
            {
                "type": "response.output_item.added",
                "output_index": item.index,
                "item": item.item("in_progress", is_new=True),
            }
        )
        if call is None:
            added = {"type": "response.content_part.added", **item.place(), "part": item.part()}
            events.append(added)
        return events

    def _close(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        self._open = None
        finished = item.item(status)
        self._done.append(finished)
        done: Event = {"type": f"{_DELTA[item.kind]}.done", **item.place()}
        if item.call is not None:
            events = [{**done, "name": item.call.name, "arguments": item.text}]
        else:
            done["text"] = item.text
            if item.kind == "message":
                done["logprobs"] = list(item.logprobs)
            part = {"type": "response.content_part.done", **item.place(), "part": item.part()}
            events = [done, part]
        last = {
            "type": "response.output_item.done",
            "output_index": item.index,
            "item": finished,
        }
        return [*events, last]
