"""The client's side of an engine: submit requests, follow their samples, abort, ask.

A `Client` lives in one asyncio loop and talks through a channel (`channel.py`) to the engine's
loop, in this process or another. It keeps all that is needed to submit a request again: prompt,
parameters, output ids so far and the text already delivered. When an engine dies and is started
again, the requests that it had go on where they were (`recovery.py` says in which order). It knows
nothing of HTTP, tokenizers or models.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from trunkline.engine import messages
from trunkline.engine.channel import Channel
from trunkline.engine.messages import EngineStatus
from trunkline.engine.recovery import Recovery
from trunkline.engine.stream import (
    DeadlyRequest,
    EngineDied,
    EventsLost,
    Place,
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
    "DeadlyRequest",
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

    def __init__(self, channel: Channel, changed: Callable[[], None] | None = None) -> None:
        """Prepare; `changed` is called when `status` has another state, epoch or access."""
        self._channel = channel
        self._on_change = changed
        self._keys = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._recovery = Recovery()
        self._withdrawn: set[int] = set()  # unfinished samples of the suspect, to be taken back
        self._controls: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._decoder = msgspec.msgpack.Decoder(list[messages.Event])
        self._encoder = msgspec.msgpack.Encoder()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Connect; returns before the engine is ready (see `ready` and `status`)."""
        await self._channel.open(self._deliver, self._status_changed)

    async def ready(self, rank: int | None = None) -> None:
        """Return once the engine can take requests.

        Args:
            rank: which engine; there is one.

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
        self._fail_all(EngineDied(reason))
        await self._channel.close()

    @property
    def status(self) -> EngineStatus:
        """Where the engine stands now; never waits for it."""
        return self._channel.status()

    @property
    def in_flight(self) -> Collection[Stream]:
        """The streams that have not ended, in an engine or not; to be read at once."""
        held = self._recovery.held
        return [*self._streams.values(), *held] if held else self._streams.values()

    @property
    def replicas(self) -> tuple[Client, ...]:
        """The client of each engine, by rank: there is one."""
        return (self,)

    @property
    def held(self) -> list[Stream]:
        """What a dead engine had and the next one will get."""
        return self._recovery.held

    @property
    def is_testing(self) -> bool:
        """Whether the engine runs a suspect of this client alone."""
        return self._recovery.suspect is not None

    @property
    def is_holding(self) -> bool:
        """Whether what is submitted waits while suspects are tried, of any client."""
        return self.is_testing or self.status.access == "suspects"

    def submit(self, request: Request, place: Place | None = None) -> Stream:
        """Send a request; the stream's `accepted` tells whether the engine took it.

        When the engine is not ready, the stream fails with `EngineDied`: only what an engine had
        is submitted again.

        Args:
            request: what to compute.
            place: where the request is accounted for, if there are several engines.
        """
        status = self.status
        stream = Stream(request, next(self._keys), status.epoch, self._abort_stream)
        stream.placed(place)
        if status.state != "ready":
            stream.fail(EngineDied(status.error or f"the engine is {status.state}"))
        elif self.is_holding:
            self._recovery.hold(stream)
        else:
            self._dispatch(stream)
        return stream

    def release(self, stream: Stream) -> None:
        """Give up a held request: another client will `adopt` it."""
        self._recovery.drop(stream)

    def adopt(self, stream: Stream, place: Place) -> None:
        """Go on with a request that another client has released."""
        stream.moved(place, self._abort_stream)
        if self.status.state != "ready" or self.is_holding:
            self._recovery.hold(stream)
        else:
            self._submit_again(stream)

    def abort(self, rid: str | None = None) -> None:
        """Ask the engine to end the request or sample with this id, whosever it is; None: all."""
        streams = self.in_flight
        for stream in [one for one in streams if one.request.rid == rid] or streams:
            stream.want_end(rid)
        for stream in self._recovery.held:
            self._end_held(stream)
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

    async def flush_cache(self) -> bool:
        """Empty the prefix cache if the engine is idle; whether it was. Raises as `control`."""
        return bool((await self.control("flush_cache"))["flushed"])

    def report(self, rank: int, figures: Mapping[str, float]) -> None:
        """Note what an engine said of its load: of use where one has to be chosen."""

    def _send(self, kind: bytes, message: msgspec.Struct, epoch: int) -> None:
        self._channel.send(kind, epoch, self._encoder.encode(message))

    def _dispatch(self, stream: Stream) -> None:
        """Give a request to the engine that is ready now."""
        self._streams[stream.key] = stream
        self._send(messages.SUBMIT, _submit(stream), stream.epoch)
        if not stream.dispatched_ts:
            stream.dispatched_ts = time.time()

    def _resubmit(self) -> None:
        """Give the engine what it may have now of what another one left."""
        for stream in self._recovery.due(self.status.access):
            self._submit_again(stream)

    def _submit_again(self, stream: Stream) -> None:
        epoch = self.status.epoch
        stream.resubmitted(next(self._keys), epoch)
        self._dispatch(stream)
        for sample in stream.samples:
            if sample.finished is not None and sample.finished.reason in ("abort", "error"):
                rid = stream.request.sample_rid(sample.index)
                self._send(messages.ABORT, messages.Abort(rid=rid), epoch)

    def _abort_stream(self, stream: Stream) -> None:
        stream.want_end()
        if stream.key in self._streams:
            self._send(messages.ABORT, messages.Abort(key=stream.key), stream.epoch)
        elif stream in self._recovery.held:
            self._end_held(stream)

    def _end_held(self, stream: Stream) -> None:
        """End what is to end of a request that no engine has."""
        if stream.end_aborted(time.time()):
            self._recovery.drop(stream)

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
            if stream is None:
                continue
            if stream is self._recovery.suspect:
                self._apply_to_suspect(stream, event, now)
            else:
                self._apply(stream, event, now)

    def _apply(self, stream: Stream, event: messages.Event, now: float) -> bool:
        """Hand an event to its stream; True when it was the last."""
        try:
            ended = stream.apply(event, now)
        except EventsLost as error:
            self._abort_stream(stream)
            stream.fail(error)
            ended = True
        if ended:
            del self._streams[stream.key]
        return ended

    def _apply_to_suspect(self, stream: Stream, event: messages.Event, now: float) -> None:
        """As `_apply`; once the suspect has gained a token, take it back and let the others in."""
        if self._withdrawn:
            if isinstance(event, messages.Finished):
                self._withdrawn.discard(event.sample)
            if self._withdrawn:
                return
            del self._streams[stream.key]
            self._recovery.test_ended(stream, finished=stream.end_aborted(now))
        elif self._apply(stream, event, now):
            self._recovery.test_ended(stream, finished=True)
        else:
            if self._recovery.is_cleared(stream):
                self._withdrawn = {s.index for s in stream.samples if s.finished is None}
                self._send(messages.ABORT, messages.Abort(key=stream.key), stream.epoch)
            return
        self._resubmit()

    def _answer(self, reply: messages.ControlReply) -> None:
        future = self._controls.get(reply.key)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(ControlFailed(reply.error))

    def _status_changed(self) -> None:
        """The channel says that the engine's state, epoch or access is another than before."""
        status = self.status
        self._engine_died(status)
        if status.access == "shared" and not self._withdrawn:
            self._recovery.others_joined()
        if status.state == "ready":
            self._resubmit()
        if self._on_change is not None:
            self._on_change()
        if status.state == "dead":
            self._fail_all(EngineDied(status.error or "the engine has died"))
        self._changed.set()

    def _engine_died(self, status: EngineStatus) -> None:
        """Hold what another engine life had, until one is ready."""
        alive = status.epoch if status.state == "ready" else None
        lost = [stream for stream in self._streams.values() if stream.epoch != alive]
        if not lost and alive is not None:
            return
        now = time.time()
        self._withdrawn.clear()
        for stream in lost:
            del self._streams[stream.key]
        error = EngineDied(status.error or "the engine was restarted")
        for future in self._controls.values():
            if not future.done():
                future.set_exception(error)
        unfinished = [one for one in lost if not one.end_aborted(now)]
        entered = self._channel.entered(max(one.epoch for one in lost)) if lost else None
        guilty = self._recovery.engine_died(unfinished, entered)
        if guilty is not None:
            words = f"the engine died each time that it ran this request: {error}"
            guilty.fail(DeadlyRequest(words))

    def _fail_all(self, error: EngineDied) -> None:
        """No engine will ever run what is in flight."""
        for stream in (*self._streams.values(), *self._recovery.held):
            self._recovery.drop(stream)
            stream.fail(error)
        self._streams.clear()
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
        # After a death every token is told at once, so that one that is gained is seen.
        stream_interval=1 if stream.deaths or stream.idle_deaths else request.stream_interval,
        priority=request.priority,
        namespace=request.namespace,
        request_class=request.request_class,
        logprobs=_missing_logprobs(stream),
        pooled=request.pooled,
        resume=stream.progress() if stream.is_resubmission else [],
        must_prepare=request.grammar is not None,
        grammar=request.grammar,
    )


def _missing_logprobs(stream: Stream) -> messages.LogprobRequest | None:
    """What a request wants to know and does not yet: its prompt is scored once."""
    wanted = stream.request.logprobs
    if wanted is None or any(sample.prompt_logprobs is None for sample in stream.samples):
        return wanted
    return msgspec.structs.replace(wanted, prompt_start=None)
