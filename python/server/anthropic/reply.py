"""POST /v1/messages: the message, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trunkline.engine.client import Sample, Stream, Update
from trunkline.server.anthropic.content import ContentWriter, Event
from trunkline.server.anthropic.errors import error_envelope
from trunkline.server.errors import Failure, describe
from trunkline.server.http import named_event_frames
from trunkline.server.openai import rows
from trunkline.server.openai.splitting import OutputSplitter


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOptions:
    """What a message repeats of its request."""

    id: str
    model: str
    max_tokens: int


class MessageReply:
    """One message as it grows; both the reply of a job and the style of its events."""

    def __init__(self, options: MessageOptions, splitter: OutputSplitter) -> None:
        self._options = options
        self._splitter = splitter
        self._writer = ContentWriter()

    def whole(self, streams: Sequence[Stream]) -> object:
        [sample] = streams[0].samples
        self._writer.feed(self._splitter.feed(sample.text))
        self._finish()
        message = {**self._head(), "content": self._writer.blocks, **self._ending(sample)}
        return {**message, "usage": self._usage(streams)}

    def opening(self, streams: Sequence[Stream]) -> list[object]:
        nothing = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(streams)}
        message = {**self._head(), "content": [], **nothing}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def events(self, prompt: int, stream: Stream, updates: Iterable[Update]) -> list[object]:
        events: list[object] = []
        for update in updates:
            events += self._writer.feed(self._splitter.feed(update.text))
        return events

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        events: list[object] = [*self._finish()]
        [sample] = streams[0].samples
        delta = {
            "type": "message_delta",
            "delta": self._ending(sample),
            "usage": self._usage(streams),
        }
        return [*events, delta, {"type": "message_stop"}]

    def frames(self, payloads: Sequence[Any]) -> bytes:
        return named_event_frames(payloads)

    def end(self) -> bytes:
        return b""

    def failure(self, failure: Failure) -> list[object]:
        status, body = describe(failure)
        return [error_envelope(status, str(body["message"]))]

    def _finish(self) -> list[Event]:
        return self._writer.feed(self._splitter.end()) + self._writer.close()

    def _usage(self, streams: Sequence[Stream]) -> dict[str, Any]:
        [sample] = streams[0].samples
        return message_usage(streams, self._splitter.reasoning_tokens(sample.output_ids))

    def _head(self) -> dict[str, Any]:
        options = self._options
        return {
            "id": options.id,
            "type": "message",
            "role": "assistant",
            "model": options.model,
        }

    def _ending(self, sample: Sample) -> dict[str, Any]:
        """Why the message ended, and with which of the client's sequences."""
        end = sample.finished
        sequence = None
        if end is None or end.reason not in ("stop", "length"):
            reason = "pause_turn"  # somebody aborted it: it can be taken up where it is
        elif end.reason == "length":
            is_full = end.completion_tokens < self._options.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(end.matched, str):
            reason, sequence = "stop_sequence", end.matched
        else:
            reason = "tool_use" if self._writer.calls_tools else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def message_usage(streams: Sequence[Stream], thinking_tokens: int) -> dict[str, Any]:
    """Token counts so far, in Anthropic's words: `input_tokens` are those that no cache held."""
    usage: Any = rows.usage(streams)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
        "service_tier": "standard",
    }
