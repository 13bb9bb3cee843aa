"""Responses that no HTTP request waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from trunkline.engine.client import Stream, Update, merged
from trunkline.engine.validation import RequestError
from trunkline.server import logs
from trunkline.server.answer import Job, raise_failed
from trunkline.server.errors import FAILURES
from trunkline.server.http import named_event_frames
from trunkline.server.meter import Meter
from trunkline.server.openai.event_log import EventLog
from trunkline.server.openai.responses_reply import ResponseReply
from trunkline.server.request_log import RequestLog
from trunkline.server.state import Server


async def start(server: Server, job: Job, reply: ResponseReply) -> EventLog:
    """Submit a job and leave it running; returns once the engine has it.

    While it runs it counts as in flight, so that a server that shuts down gives it its time.

    Returns:
        Its events; there are none unless the job is a stream.

    Raises:
        Failure: the engine refused it or is not there.
    """
    [request] = job.requests
    stream = server.client.submit(request)
    try:
        await stream.accepted()
    except BaseException:
        stream.abort()
        raise
    work = _Work(server, job, reply, stream)
    reply.keep_running([stream], work.events if job.stream else None)
    task = asyncio.create_task(work.run())
    server.background.add(task)
    task.add_done_callback(server.background.discard)
    return work.events


class _Work:
    """One response on its way, with its metrics and log lines."""

    def __init__(self, server: Server, job: Job, reply: ResponseReply, stream: Stream) -> None:
        self.events = EventLog()
        self._server = server
        self._job = job
        self._reply = reply
        self._stream = stream
        self._log = RequestLog(server)
        self._log.received(job.requests)
        self._meter = Meter(server.metrics, [stream], job.stream)
        self._meter.accepted = True

    async def run(self) -> None:
        stream = self._stream
        try:
            with self._server.running(self._job.rid, [stream.request.rid]):
                await (self._send_events() if self._job.stream else self._answer())
        except FAILURES as failure:
            self._add(self._reply.failure(failure))
        except Exception:
            logs.SERVER.exception("a background response failed in the server")
            words = RequestError("the server failed; its log says why", status=500)
            self._add(self._reply.failure(words))
        finally:
            stream.abort()
            self._reply.leave()
            self.events.close()
            self._meter.close()
            self._log.finished([stream])

    async def _answer(self) -> None:
        await self._stream.finished()
        for sample in self._stream.samples:
            self._meter.seen(self._stream, sample, len(sample.output_ids))
        raise_failed(self._stream.samples)
        self._reply.whole([self._stream])

    async def _send_events(self) -> None:
        self._add(self._reply.opening([self._stream]))
        async for stream, updates in merged([self._stream]):
            self._see(updates)
            self._add(self._reply.events(0, stream, updates))
        self._add(self._reply.closing([self._stream]))

    def _see(self, updates: Iterable[Update]) -> None:
        for update in updates:
            self._meter.seen(self._stream, update.sample, len(update.token_ids))
        raise_failed(update.sample for update in updates if update.finished)

    def _add(self, events: Iterable[Any]) -> None:
        if self._job.stream:
            self.events.add(named_event_frames([event]) for event in events)
