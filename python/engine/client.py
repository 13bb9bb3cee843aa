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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from trunkline.engine import messages
from trunkline.engine.channel import Channel
from trunkline.engine.messages import EngineStatus, Logprobs, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated, tokenised request.

    `stream_interval` is the number of tokens between updates; 0 gives one at the end.
    `received_ts` is when the API saw it (unix seconds).
    """

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    stream_interval: int = 1
    priority: int = 0
    namespace: str = ""
    request_class: int = 0
    logprobs: messages.LogprobRequest | None = None
    received_ts: float


class RequestRefused(Exception):
    """The engine never took the request: nothing was computed."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param


class EngineDied(Exception):
    """The engine is gone, and with it the request; or it is not there yet."""


class ControlFailed(Exception):
    """The engine answered a control message with an error."""


class Update(NamedTuple):
    """What came new for one sample. Offsets are absolute: tokens, and code points of the text."""

    sample: Sample
    text: str
    token_ids: list[int]
    token_offset: int
    text_offset: int
    logprobs: Logprobs | None
    finished: bool


class Sample:
    """The growing state of one sample of a request; read-only for callers.

    `output_ids` and the log-prob lists grow in place. `first_token_ts` and `finished_ts` are when
    this side saw the first token and the end (unix seconds).
    """

    __slots__ = (
        "_length",
        "_parts",
        "finished",
        "finished_ts",
        "first_token_ts",
        "index",
        "output_ids",
        "output_logprobs",
        "prompt_logprobs",
        "started",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.output_ids: list[int] = []
        self.started: messages.Started | None = None
        self.finished: messages.Finished | None = None
        self.output_logprobs: Logprobs | None = None
        self.prompt_logprobs: Logprobs | None = None
        self.first_token_ts: float | None = None
        self.finished_ts: float | None = None
        self._parts: list[str] = []
        self._length = 0

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def _apply(self, event: messages.Delta | messages.Finished, now: float) -> Update:
        """Add what the event brings beyond what is known already."""
        known_tokens = len(self.output_ids) - event.token_offset
        known_text = self._length - event.text_offset
        if known_tokens < 0 or known_text < 0:
            raise RuntimeError(
                f"events were lost: sample {self.index} has {len(self.output_ids)} tokens and "
                f"{self._length} characters, the next event starts at token {event.token_offset} "
                f"and character {event.text_offset}"
            )
        token_ids = event.token_ids[known_tokens:]
        text = event.text[known_text:]
        logprobs = _slice(event.logprobs, known_tokens)
        update = Update(
            sample=self,
            text=text,
            token_ids=token_ids,
            token_offset=len(self.output_ids),
            text_offset=self._length,
            logprobs=logprobs,
            finished=isinstance(event, messages.Finished),
        )
        self.output_ids.extend(token_ids)
        if text:
            self._parts.append(text)
            self._length += len(text)
        self.output_logprobs = _joined(self.output_logprobs, logprobs)
        self.prompt_logprobs = _joined(self.prompt_logprobs, event.prompt_logprobs)
        if self.first_token_ts is None and token_ids:
            self.first_token_ts = now
        if isinstance(event, messages.Finished):
            self.finished = event
            self.finished_ts = now
        return update


class Stream:
    """One request in flight. Belongs to its client's asyncio loop; one consumer at a time."""

    def __init__(self, client: Client, request: Request, key: int, epoch: int) -> None:
        self.request = request
        self.samples = [Sample(index) for index in range(request.n)]
        self.dispatched_ts = 0.0
        self.key = key
        self.epoch = epoch
        self._client = client
        self._unfinished = request.n
        self._accepted = False
        self._error: Exception | None = None
        self._pending: dict[int, Update] = {}
        self._wake = asyncio.Event()

    async def accepted(self) -> None:
        """Return once the engine has taken the request.

        Raises:
            RequestRefused: the engine never took it.
            EngineDied: the engine was lost before it answered.
        """
        while not self._accepted:
            if self._error is not None:
                raise self._error
            await self._sleep()

    async def finished(self) -> None:
        """Return once every sample has finished.

        Raises:
            RequestRefused: the engine never took the request.
            EngineDied: the engine was lost before the end.
        """
        while self._unfinished:
            if self._error is not None:
                raise self._error
            await self._sleep()
        self._pending.clear()

    def __aiter__(self) -> AsyncIterator[list[Update]]:
        """Yield all that is new per wake-up, one merged update per sample, until all have finished.

        Raises:
            RequestRefused: the engine never took the request.
            EngineDied: the engine was lost; updates that came before are yielded first.
        """
        return self._updates()

    async def _updates(self) -> AsyncIterator[list[Update]]:
        async for _, updates in merged([self]):
            yield updates

    def _take(self) -> list[Update]:
        """All that is new since the last call; raises what ended the stream once that is taken."""
        if not self._pending and self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return list(pending.values())

    @property
    def _drained(self) -> bool:
        return not self._unfinished and not self._pending

    def abort(self) -> None:
        """Ask the engine to end the request. Idempotent, and harmless after the end."""
        self._client._abort_stream(self)

    async def _sleep(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    def _apply(self, event: messages.Event, now: float) -> bool:
        """Take one event; True when it was the last."""
        match event:
            case messages.Accepted():
                self._accepted = True
            case messages.Refused():
                self._error = RequestRefused(event.status, event.kind, event.message, event.param)
                self._wake.set()
                return True
            case messages.Started():
                self.samples[event.sample].started = event
            case messages.Delta() | messages.Finished():
                self._accepted = True
                update = self.samples[event.sample]._apply(event, now)
                earlier = self._pending.get(event.sample)
                self._pending[event.sample] = (
                    update if earlier is None else _merged(earlier, update)
                )
                self._unfinished -= update.finished
        self._wake.set()
        return self._unfinished == 0


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

    async def close(self) -> None:
        """Abort what is in flight, fail what waits, and let go of the engine. Idempotent."""
        if self._streams and self.status.state == "ready":
            for stream in list(self._streams.values()):
                self._abort_stream(stream)
        self._lose(EngineDied("the client was closed"), epoch=None)
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
        stream = Stream(self, request, next(self._keys), status.epoch)
        if status.state != "ready":
            stream._fail(EngineDied(status.error or f"the engine is {status.state}"))
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
            if stream is not None and stream._apply(event, now):
                del self._streams[event.key]

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
            stream._fail(error)
        if epoch is None:
            for future in self._controls.values():
                if not future.done():
                    future.set_exception(error)


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[Stream, list[Update]]]:
    """Yield the updates of several streams as they come, each with its stream, until all end.

    Raises:
        RequestRefused: the engine did not take one of them.
        EngineDied: the engine was lost.
    """
    wake = asyncio.Event()
    for stream in streams:
        stream._wake = wake
    running = list(streams)
    while running:
        wake.clear()
        for stream in running:
            if updates := stream._take():
                yield stream, updates
        running = [stream for stream in running if not stream._drained]
        if running:
            await wake.wait()


def _submit(stream: Stream) -> messages.Submit:
    """The message for a stream's request, with all that its samples have so far."""
    request = stream.request
    resume = [
        messages.Resume(output_ids=sample.output_ids, delivered_chars=sample._length)
        for sample in stream.samples
    ]
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
        resume=resume if any(sample.output_ids for sample in stream.samples) else [],
    )


def _slice(logprobs: Logprobs | None, start: int) -> Logprobs | None:
    if logprobs is None or start == 0:
        return logprobs
    return Logprobs(logprobs.values[start:], logprobs.top[start:], logprobs.ids[start:])


def _joined(known: Logprobs | None, new: Logprobs | None) -> Logprobs | None:
    """Both parts in one; the lists of `known` grow in place."""
    if new is None:
        return known
    if known is None:
        return Logprobs(list(new.values), list(new.top), list(new.ids))
    known.values.extend(new.values)
    known.top.extend(new.top)
    known.ids.extend(new.ids)
    return known


def _merged(earlier: Update, later: Update) -> Update:
    logprobs = earlier.logprobs
    if logprobs is not None:
        logprobs = Logprobs(list(logprobs.values), list(logprobs.top), list(logprobs.ids))
    return Update(
        sample=earlier.sample,
        text=earlier.text + later.text,
        token_ids=[*earlier.token_ids, *later.token_ids],
        token_offset=earlier.token_offset,
        text_offset=earlier.text_offset,
        logprobs=_joined(logprobs, later.logprobs),
        finished=later.finished,
    )
