"""From a parsed job to bytes on the wire: submit, wait or stream, abort on every way out.

The same for all API families; how an outcome is written is their `Reply`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from trunkline.engine.client import Request, Sample, Stream, Update, merged
from trunkline.engine.validation import RequestError
from trunkline.server.errors import FAILURES, Failure, describe
from trunkline.server.http import DONE, event_frames, json_response, read_json
from trunkline.server.meter import Meter
from trunkline.server.pinning import pinned
from trunkline.server.request_log import RequestLog
from trunkline.server.state import Server, offload, server_of

IGNORED_HEADER: Final = "x-ignored-fields"
EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a body asked for: engine requests, one per prompt. `rid` stands for all of them."""

    rid: str
    requests: list[Request]
    stream: bool
    ignored: list[str] = field(default_factory=list)


class Reply(Protocol):
    """How an API family writes a job's outcome; payloads are JSON values."""

    def whole(self, streams: Sequence[Stream]) -> object:
        """The body of an answer in one piece."""

    def opening(self, streams: Sequence[Stream]) -> list[object]:
        """Events before the first token."""

    def events(self, prompt: int, stream: Stream, updates: Iterable[Update]) -> list[object]:
        """Events for what is new of one prompt's samples."""

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        """Events after the last token."""


@dataclass(frozen=True, slots=True)
class WholeReply:
    """The reply of jobs that are never streams; `write` makes the body."""

    write: Callable[[Sequence[Stream]], object]

    def whole(self, streams: Sequence[Stream]) -> object:
        return self.write(streams)

    def opening(self, streams: Sequence[Stream]) -> list[object]:
        return []

    def events(self, prompt: int, stream: Stream, updates: Iterable[Update]) -> list[object]:
        return []

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        return []


class EventStyle(Protocol):
    """How an API family frames the events of a stream, ends it, and tells of a failure in it."""

    def frames(self, payloads: Sequence[object]) -> bytes:
        """The events as they are sent."""

    def end(self) -> bytes:
        """What follows the last event of a stream that went well."""

    def failure(self, failure: Failure) -> list[object]:
        """The last events of a stream that went wrong."""


class DataEvents:
    """Events without names, `[DONE]` at the end: the way of OpenAI's older endpoints."""

    def frames(self, payloads: Sequence[object]) -> bytes:
        return event_frames(payloads)

    def end(self) -> bytes:
        return DONE

    def failure(self, failure: Failure) -> list[object]:
        return [describe(failure)[1]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body that was understood: what to compute, and how its outcome is written."""

    job: Job
    reply: Reply
    style: EventStyle = field(default_factory=DataEvents)


async def whole_answer(server: Server, prepared: Prepared) -> object:
    """Run a job that no HTTP request waits for; its body, as if it had been asked for in one piece.

    Leaving it in any way, cancellation included, aborts what still runs.

    Raises:
        Failure: the engine refused or lost it, or a sample ended in an error.
    """
    server.note_ignored(prepared.job.ignored)
    streams = [server.client.submit(request) for request in prepared.job.requests]
    try:
        await _all(stream.finished() for stream in streams)
        raise_failed(sample for stream in streams for sample in stream.samples)
        return prepared.reply.whole(streams)
    finally:
        for stream in streams:
            stream.abort()


class Generation:
    """A response that runs a job while it is sent.

    Headers go out when the engine has accepted every request, so a refusal has its own status. The
    job races the client's disconnect; whichever way it ends, what still runs is aborted.
    """

    def __init__(self, server: Server, prepared: Prepared) -> None:
        self._server = server
        self._job = prepared.job
        self._reply = prepared.reply
        self._style = prepared.style
        server.note_ignored(prepared.job.ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, job = self._server, self._job
        requests = pinned(job.requests, scope, server.native.dp_size)
        log = RequestLog(server)
        log.received(requests)
        streams = [server.client.submit(request) for request in requests]
        meter = Meter(server.metrics, streams, job.stream)
        gone = asyncio.create_task(_disconnected(receive))
        if job.stream:
            work = asyncio.create_task(self._send_events(streams, meter, send))
        else:
            work = asyncio.create_task(self._send_whole(streams, meter, scope, receive, send))
        try:
            with server.running(job.rid, [request.rid for request in job.requests]):
                await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
        finally:
            gone.cancel()
            work.cancel()
            for stream in streams:
                stream.abort()
            meter.close()
            log.finished(streams)

    async def _send_whole(
        self, streams: list[Stream], meter: Meter, scope: Scope, receive: Receive, send: Send
    ) -> None:
        await _all(stream.accepted() for stream in streams)
        meter.accepted = True
        await _all(stream.finished() for stream in streams)
        for stream in streams:
            for sample in stream.samples:
                meter.seen(stream, sample, len(sample.output_ids))
        raise_failed(sample for stream in streams for sample in stream.samples)
        headers = ignored_headers(self._job.ignored)
        response = json_response(self._reply.whole(streams), headers=headers)
        await response(scope, receive, send)

    async def _send_events(self, streams: list[Stream], meter: Meter, send: Send) -> None:
        await _all(stream.accepted() for stream in streams)
        meter.accepted = True
        named = ignored_headers(self._job.ignored).items()
        headers = [*EVENT_HEADERS, *((name.encode(), value.encode()) for name, value in named)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = self._style.frames(self._reply.opening(streams))
        if opening:
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        try:
            prompts = {stream: prompt for prompt, stream in enumerate(streams)}
            async for stream, updates in merged(streams):
                payloads = self._payloads(prompts[stream], stream, updates, meter)
                if payloads:
                    frames = self._style.frames(payloads)
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            last = self._style.frames(self._reply.closing(streams)) + self._style.end()
        except FAILURES as failure:
            last = self._style.frames(self._style.failure(failure))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _payloads(
        self, prompt: int, stream: Stream, updates: list[Update], meter: Meter
    ) -> list[object]:
        for update in updates:
            meter.seen(stream, update.sample, len(update.token_ids))
        raise_failed(update.sample for update in updates if update.finished)
        return self._reply.events(prompt, stream, updates)


def ignored_headers(names: Sequence[str]) -> dict[str, str]:
    """The header that names a body's fields without effect: printable ASCII, bounded."""
    words = ", ".join(name[:64] for name in names[:32])
    value = "".join(char if " " <= char <= "~" else "?" for char in words)
    return {IGNORED_HEADER: value} if value else {}


def raise_failed(samples: Iterable[Sample]) -> None:
    """Raise for the first sample that ended in an error (an abort by a client is none).

    Raises:
        RequestError: with the status that the engine gave the end.
    """
    for sample in samples:
        finished = sample.finished
        if finished is not None and finished.reason in ("error", "abort") and finished.status:
            message = finished.message or f"the request ended with {finished.reason}"
            raise RequestError(message, status=finished.status)


async def _all(waits: Iterable[Awaitable[None]]) -> None:
    """Wait for all; the first failure ends the waiting."""
    pending = list(waits)
    if len(pending) == 1:
        await pending[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for wait in pending:
                group.create_task(_coroutine(wait))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _coroutine(wait: Awaitable[None]) -> None:
    await wait


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def request_id(request: HttpRequest) -> str:
    """The id that the server gave an HTTP request: the default id of what it asks for."""
    return str(request.scope["trunkline.request_id"])


async def generation(
    request: HttpRequest, prepare: Callable[[Any, Server, str], Prepared]
) -> Generation:
    """Answer a JSON body; `prepare` is given it, the server, and the id of a request without one.

    Raises:
        RequestError: the body is none, or `prepare` refuses it.
    """
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    prepared = await offload(size, lambda: prepare(body, server, request_id(request)))
    return Generation(server, prepared)
