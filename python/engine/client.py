"""The client's side of an engine: submit requests, follow their samples, abort, ask.

A `Client` lives in one asyncio loop and talks through a channel (`channel.py`) to the engine's
loop, in this process or another. It keeps all that is needed to submit a request again: prompt,
parameters, output ids so far and the text already delivered. It knows nothing of HTTP, tokenizers
or models.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import msgspec

from trunkline.engine import messages
from trunkline.engine.channel import Channel
from trunkline.engine.messages import EngineStatus
from trunkline.engine.stream import (
    EngineDied,
    EventsLost,
    Request,
    RequestRefused,
    Sample,
    Stream,
    Update,
    merged,
)

__all__ = [
    "Client",
    "ControlFailed",
    "EngineDied",
    "EngineStatus",
    "EventsLost",
    "Request",
    "RequestRefused",
    "Sample",
    "Stream",
    "Update",
    "merged",
]


class ControlFailed(Exception):
    """The engine answered a control message with an error."""


class Client:
    """Submits requests to one engine and hands its events to their streams.

    Belongs to the asyncio loop that `start` runs in; every method must be called there.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._keys = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._controls: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._decoder = msgspec.msgpack.Decoder(list[messages.Event])
        self._encoder = msgspec.msgpack.Encoder()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Connect; returns before the engine is ready (see `ready` and `status`)."""
        await self._channel.open(self._deliver, self._status_changed)

    async def ready(self) -> None:
        """Return once the engine can take requests.

        Raises:
            EngineDied: it will never be; the message says why.
        """
        while (status := self.status).state != "ready":
            if status.state == "dead":
                raise EngineDied(status.error or "the engine has stopped")
            self._changed.clear()
            await self._changed.wait()

    async def close(self, reason: str = "the client was closed") -> None:
        """Abort what is in flight, fail what waits, and let go of the engine. Idempotent."""
        if self._streams and self.status.state == "ready":
            for stream in list(self._streams.values()):
                self._abort_stream(stream)
        self._lose(EngineDied(reason), epoch=None)
        await self._channel.close()

    @property
    def status(self) -> EngineStatus:
        """Where the engine stands now; never waits for it."""
        return self._channel.status()

    def submit(self, request: Request) -> Stream:
        """Send a request; the stream's `accepted` tells whether the engine took it.

        When the engine is not ready, the stream fails with `EngineDied`.
        """
        status = self.status
        stream = Stream(request, next(self._keys), status.epoch, self._abort_stream)
        if status.state != "ready":
            stream.fail(EngineDied(status.error or f"the engine is {status.state}"))
            return stream
        self._streams[stream.key] = stream
        self._send(messages.SUBMIT, _submit(stream), status.epoch)
        stream.dispatched_ts = time.time()
        return stream

    def abort(self, rid: str | None = None) -> None:
        """Ask the engine to end the request or sample with this id, whosever it is; None: all."""
        self._send(messages.ABORT, messages.Abort(rid=rid, all=rid is None), self.status.epoch)

    async def control(
        self, verb: str, **arguments: str | int | float | bool | None
    ) -> dict[str, object]:
        """Ask the engine's loop; answered between two steps.

        Raises:
            ControlFailed: the engine does not know the verb or could not do it.
            EngineDied: the engine is not ready, or was lost before it answered.
        """
        status = self.status
        if status.state != "ready":
            raise EngineDied(status.error or f"the engine is {status.state}")
        key = next(self._keys)
        future: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._controls[key] = future
        message = messages.Control(key=key, verb=verb, arguments=arguments)
        self._send(messages.CONTROL, message, status.epoch)
        try:
            return await future
        finally:
            self._controls.pop(key, None)

    def _send(self, kind: bytes, message: msgspec.Struct, epoch: int) -> None:
        self._channel.send(kind, epoch, self._encoder.encode(message))

    def _abort_stream(self, stream: Stream) -> None:
        if stream.key in self._streams:
            self._send(messages.ABORT, messages.Abort(key=stream.key), stream.epoch)

    def _deliver(self, epoch: int, blob: bytes) -> None:
        """Take one blob of events; those of another engine life are dropped."""
        if epoch != self.status.epoch:
            return
        now = time.time()
        for event in self._decoder.decode(blob):
            if isinstance(event, messages.ControlReply):
                self._answer(event)
                continue
            stream = self._streams.get(event.key)
            if stream is not None:
                self._apply(stream, event, now)

    def _apply(self, stream: Stream, event: messages.Event, now: float) -> None:
        try:
            ended = stream.apply(event, now)
        except EventsLost as error:
            self._abort_stream(stream)
            stream.fail(error)
            ended = True
        if ended:
            del self._streams[stream.key]

    def _answer(self, reply: messages.ControlReply) -> None:
        future = self._controls.get(reply.key)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(ControlFailed(reply.error))

    def _status_changed(self) -> None:
        """The channel says that the engine's state or epoch is another than before."""
        status = self.status
        if status.state == "ready":
            self._lose(EngineDied("the engine was restarted"), epoch=status.epoch)
        else:
            self._lose(EngineDied(status.error or "the engine has died"), epoch=None)
        self._changed.set()

    def _lose(self, error: EngineDied, epoch: int | None) -> None:
        """Fail all that is in flight, except in the engine life `epoch`."""
        for stream in [s for s in self._streams.values() if s.epoch != epoch]:
            del self._streams[stream.key]
            stream.fail(error)
        if epoch is None:
            for future in self._controls.values():
                if not future.done():
                    future.set_exception(error)


def _submit(stream: Stream) -> messages.Submit:
    """The message for a stream's request, with all that its samples have so far."""
    request = stream.request
    return messages.Submit(
        key=stream.key,
        rid=request.rid,
        prompt=request.prompt_ids,
        sampling=request.sampling,
        n=request.n,
        stream_interval=request.stream_interval,
        priority=request.priority,
        namespace=request.namespace,
        request_class=request.request_class,
        logprobs=request.logprobs,
        resume=stream.progress(),
    )
