"""POST /v1/responses: the response, whole or as typed events, and its way into the store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from trunkline.engine.client import Sample, Stream, Update
from trunkline.engine.messages import Logprobs
from trunkline.server.errors import Failure, describe
from trunkline.server.http import named_event_frames
from trunkline.server.openai import rows
from trunkline.server.openai.event_log import EventLog
from trunkline.server.openai.logprobs import chat_logprobs
from trunkline.server.openai.responses_output import Event, OutputWriter
from trunkline.server.openai.responses_store import StoredResponse
from trunkline.server.openai.splitting import OutputSplitter
from trunkline.server.state import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What a response repeats of its request, and how it is kept.

    `echoed` are fields by their public names; `input_items` are those of this request alone.
    """

    id: str
    created_at: int
    echoed: Mapping[str, Any]
    input_items: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_stored(self) -> bool:
        return bool(self.echoed["store"])

    @property
    def is_background(self) -> bool:
        return bool(self.echoed["background"])


class ResponseReply:
    """One response as it grows; both the reply of a job and the style of its events."""

    def __init__(self, server: Server, options: ResponseOptions, splitter: OutputSplitter) -> None:
        self._texts = server.token_texts
        self._store = server.responses
        self._options = options
        self._splitter = splitter
        self._writer = OutputWriter()
        self._entry: StoredResponse | None = None
        self._streams: Sequence[Stream] = ()
        self._status = "queued" if options.is_background else "in_progress"
        self._outcome: dict[str, Any] = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        self._num_events = 0

    @property
    def is_background(self) -> bool:
        """Whether no HTTP request waits for it."""
        return self._options.is_background

    def whole(self, streams: Sequence[Stream]) -> object:
        self._keep(streams)
        [sample] = streams[0].samples
        self._take(sample, sample.text, sample.output_ids, sample.output_logprobs)
        self._finish(streams)
        return self.snapshot()

    def opening(self, streams: Sequence[Stream]) -> list[object]:
        self._keep(streams)
        created = self._with_response("response.created")
        self._status = "in_progress"
        return self._numbered([created, self._with_response("response.in_progress")])

    def events(self, prompt: int, stream: Stream, updates: Iterable[Update]) -> list[object]:
        events: list[Event] = []
        for update in updates:
            events += self._take(update.sample, update.text, update.token_ids, update.logprobs)
        return self._numbered(events)

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        events = self._finish(streams)
        kind = "completed" if self._status == "completed" else "incomplete"
        return self._numbered([*events, self._with_response(f"response.{kind}")])

    def frames(self, payloads: Sequence[Any]) -> bytes:
        return named_event_frames(payloads)

    def end(self) -> bytes:
        return b""

    def failure(self, failure: Failure) -> list[object]:
        self._fail(failure)
        return self._numbered([self._with_response("response.failed")])

    def keep_running(self, streams: Sequence[Stream], events: EventLog | None) -> None:
        """Store the response before it has an answer: it runs in the background.

        `events` is where those of a stream are kept.
        """
        self._keep(streams, events)

    def _fail(self, failure: Failure) -> None:
        self._writer.close("incomplete")
        message = describe(failure)[1]["message"]
        self._end("failed", error={"code": "server_error", "message": message})

    def leave(self) -> None:
        """Nobody waits any more: a stored response that has not ended is cancelled."""
        if self._entry is not None and not self._entry.ended.is_set():
            self._writer.close("incomplete")
            self._end("cancelled")

    def snapshot(self) -> dict[str, Any]:
        """The response object as it is now."""
        status = self._status
        if status == "queued" and any(stream.samples[0].started for stream in self._streams):
            status = "in_progress"
        return {
            "id": self._options.id,
            "object": "response",
            "created_at": self._options.created_at,
            "status": status,
            **self._outcome,
            "output": self._writer.items(),
            **self._options.echoed,
        }

    def _take(
        self, sample: Sample, text: str, ids: Sequence[int], logprobs: Logprobs | None
    ) -> list[Event]:
        scored = chat_logprobs(ids, logprobs, self._texts)
        entries: Any = [] if scored is None else scored["content"]
        pieces = self._splitter.feed(text)
        return self._writer.feed(pieces, entries, self._reasoning_tokens(sample))

    def _finish(self, streams: Sequence[Stream]) -> list[Event]:
        [sample] = streams[0].samples
        status, details = _ending(sample)
        pieces = self._splitter.end()
        events = self._writer.feed(pieces, num_reasoning=self._reasoning_tokens(sample))
        events += self._writer.close("completed" if status == "completed" else "incomplete")
        self._end(status, incomplete_details=details)
        return events

    def _reasoning_tokens(self, sample: Sample) -> int:
        return self._splitter.reasoning_tokens(sample.output_ids)

    def _end(self, status: str, **outcome: Any) -> None:
        self._status = status
        samples = [stream.samples[0] for stream in self._streams]
        reasoning = sum(map(self._reasoning_tokens, samples))
        self._outcome |= {**outcome, "usage": response_usage(self._streams, reasoning)}
        if status == "completed":
            self._outcome["completed_at"] = int(time.time())
        if self._entry is not None:
            self._store.finish(self._entry, self.snapshot())

    def _keep(self, streams: Sequence[Stream], events: EventLog | None = None) -> None:
        self._streams = streams
        if not self._options.is_stored or self._entry is not None:
            return
        self._entry = StoredResponse(
            id=self._options.id,
            previous_id=self._options.echoed["previous_response_id"],
            is_background=self._options.is_background,
            input_items=orjson.dumps(self._options.input_items),
            snapshot=self.snapshot,
            abort=streams[0].abort,
            events=events,
        )
        self._store.add(self._entry)

    def _with_response(self, kind: str) -> Event:
        return {"type": kind, "response": self.snapshot()}

    def _numbered(self, events: Iterable[Event]) -> list[object]:
        numbered: list[object] = []
        for event in events:
            numbered.append({**event, "sequence_number": self._num_events})
            self._num_events += 1
        return numbered


def _ending(sample: Sample) -> tuple[str, dict[str, str] | None]:
    """Status and `incomplete_details` for the way in which a sample ended."""
    reason = sample.finished.reason if sample.finished else "abort"
    if reason == "stop":
        return "completed", None
    if reason == "length":
        return "incomplete", {"reason": "max_output_tokens"}
    return "cancelled", None


def response_usage(streams: Sequence[Stream], reasoning_tokens: int) -> dict[str, Any]:
    """Token counts in the words of this endpoint; what was not cached was written to the cache."""
    usage: Any = rows.usage(streams, reasoning_tokens)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": usage["prompt_tokens"] - cached,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
