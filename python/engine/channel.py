"""Between a client and an engine's loop: one interface for both ways to reach it.

The client's end is a `Channel`, the loop's end a `Port`. `LocalHub` joins them inside one process;
`SocketPort` and `SocketLink` do so over a Unix socket (ZeroMQ), with any number of clients. Both
carry bytes and never look into them. Every message bears the boot epoch of the engine life that it
belongs to, so that what was meant for (or said by) an engine that died is told apart and dropped.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import zmq

from trunkline.engine.entries import Begun
from trunkline.engine.messages import EngineFacts, EngineStatus

Deliver = Callable[[int, bytes], None]
Changed = Callable[[], None]

EPOCH_BYTES: Final = 8
CLIENT_PREFIX: Final = b"c"  # a ZeroMQ identity must not begin with a zero byte


class Channel(Protocol):
    """The client's end. Everything happens in the asyncio loop in which `open` was called."""

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        """Begin; does not wait for the engine to be ready.

        Args:
            deliver: called with `(boot epoch, blob of events)` for each message of the engine.
            changed: called whenever `status` has another state, epoch or access than before.
        """

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        """Send one message to the engine; never blocks, and is silently lost if it has died."""

    def status(self) -> EngineStatus:
        """Where the engine stands now; never waits."""

    def entered(self, epoch: int) -> Begun | None:
        """What the engine of that life has begun to run; None: not known."""

    async def close(self) -> None:
        """Let go of the engine (and stop it, if this end owns it). Idempotent."""


class Message(NamedTuple):
    """What a client sent."""

    client: int
    kind: bytes
    payload: bytes


class Port(Protocol):
    """The loop's end; used by the loop's thread alone, except for `wake`."""

    def receive(self, timeout_s: float) -> list[Message]:
        """Return all that has come; wait up to `timeout_s` for the first, or until `wake`."""

    def send(self, client: int, blob: bytes) -> bool:
        """Send a blob of events; False if that client is gone."""

    def wake(self) -> None:
        """Make `receive` return, now or at its next call. May be called from any thread."""


class LocalHub:
    """An engine and its clients in one process: the `Port`, and the maker of `Channel`s.

    The engine's thread announces its state here; each client is told in its own asyncio loop. A
    client whose loop is closed counts as gone.
    """

    EPOCH: Final = 1  # an engine in the same process is never restarted

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._channels: dict[int, LocalChannel] = {}
        self._next_client = 0
        self._lock = threading.Lock()  # guards the two above
        self._status = EngineStatus(state="starting", epoch=self.EPOCH)
        self._beat_at: float | None = None

    def channel(self) -> LocalChannel:
        """Make the end for one more client."""
        with self._lock:
            self._next_client += 1
            return LocalChannel(self, self._next_client)

    def receive(self, timeout_s: float) -> list[Message]:
        """See `Port`."""
        received = []
        try:
            first = (
                self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            )
            received.append(first)
            while True:
                received.append(self._inbox.get_nowait())
        except queue.Empty:
            return [message for message in received if message is not None]

    def send(self, client: int, blob: bytes) -> bool:
        """See `Port`."""
        channel = self._channels.get(client)
        return channel is not None and channel.post(self.EPOCH, blob)

    def wake(self) -> None:
        """See `Port`."""
        self._inbox.put(None)

    def beat(self) -> None:
        """Note that the loop goes round."""
        self._beat_at = time.monotonic()

    def announce_ready(self, facts: EngineFacts) -> None:
        """The engine takes requests from now on."""
        self._announce(EngineStatus(state="ready", epoch=self.EPOCH, facts=facts))

    def announce_dead(self, error: str) -> None:
        """The engine has stopped, for the reason given."""
        self._announce(
            EngineStatus(state="dead", epoch=self.EPOCH, facts=self._status.facts, error=error)
        )

    def status(self) -> EngineStatus:
        """Where the engine stands now."""
        status, beat_at = self._status, self._beat_at
        age = None if beat_at is None else time.monotonic() - beat_at
        return EngineStatus(
            state=status.state,
            epoch=status.epoch,
            heartbeat_age_s=age,
            facts=status.facts,
            error=status.error,
        )

    def put(self, message: Message) -> None:
        """Take a client's message."""
        self._inbox.put(message)

    def attach(self, client: int, channel: LocalChannel) -> None:
        """Send to this channel from now on."""
        with self._lock:
            self._channels[client] = channel

    def detach(self, client: int) -> None:
        """Send to this client no more: its next event tells the loop that it is gone."""
        with self._lock:
            self._channels.pop(client, None)

    def _announce(self, status: EngineStatus) -> None:
        self._status = status
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.post_change()


class LocalChannel:
    """The end of one client of a `LocalHub`."""

    def __init__(self, hub: LocalHub, client: int) -> None:
        self._hub = hub
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Deliver = _ignore
        self._changed: Changed = _ignore

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        """See `Channel`."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._changed = changed
        self._hub.attach(self._client, self)

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        """See `Channel`."""
        if epoch == self._hub.EPOCH:
            self._hub.put(Message(self._client, kind, payload))

    def status(self) -> EngineStatus:
        """See `Channel`."""
        return self._hub.status()

    def entered(self, epoch: int) -> Begun | None:
        """See `Channel`; of no use where an engine is never started again."""
        return None

    async def close(self) -> None:
        """See `Channel`; the engine goes on."""
        self._hub.detach(self._client)

    def post(self, epoch: int, blob: bytes) -> bool:
        """Hand a blob over to the client's loop; False if that is closed."""
        return self._call(self._deliver, epoch, blob)

    def post_change(self) -> None:
        """Tell the client that the status has changed."""
        self._call(self._changed)

    def _call(self, function: Callable[..., None], *arguments: object) -> bool:
        assert self._loop is not None, "only attached channels are posted to"
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed
            self._hub.detach(self._client)
            return False
        return True


class SocketPort:
    """The loop's end of a Unix socket: a ROUTER that clients reach by number."""

    def __init__(self, path: str, epoch: int) -> None:
        self._epoch = epoch
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # the number of live requests bounds what can be queued
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(f"ipc://{path}")
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[Message]:
        """See `Port`."""
        ready = self._poller.poll(math.ceil(timeout_s * 1000))
        if any(source == self._wake_read for source, _ in ready):
            os.read(self._wake_read, 4096)
        received: list[Message] = []
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            if int.from_bytes(frame[1 : 1 + EPOCH_BYTES], "little") == self._epoch:
                client = int(identity.removeprefix(CLIENT_PREFIX))
                received.append(Message(client, frame[:1], frame[1 + EPOCH_BYTES :]))

    def send(self, client: int, blob: bytes) -> bool:
        """See `Port`."""
        frame = self._epoch.to_bytes(EPOCH_BYTES, "little") + blob
        try:
            self._socket.send_multipart((_identity(client), frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def wake(self) -> None:
        """See `Port`."""
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # enough wake-ups wait to be read already

    def close(self) -> None:
        """Free socket and pipe."""
        self._socket.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


class SocketLink:
    """The client's end of a Unix socket: a DEALER, which reconnects when the engine is restarted.

    It knows nothing of the engine's state; `process.EngineProcess` adds that.
    """

    def __init__(self, path: str, client: int, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.IDENTITY, _identity(client))
        self._socket.connect(f"ipc://{path}")
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        """See `Channel`."""
        self._socket.send(kind + epoch.to_bytes(EPOCH_BYTES, "little") + payload, zmq.NOBLOCK)
        # Sending may consume the edge that the descriptor would have shown for a message.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Free the socket. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()
            self._context.term()

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(int.from_bytes(frame[:EPOCH_BYTES], "little"), frame[EPOCH_BYTES:])


def _identity(client: int) -> bytes:
    return CLIENT_PREFIX + str(client).encode()


def _ignore(*arguments: object) -> None:
    """Stands in until a client has opened its channel."""
