"""Hypercorn on one listening socket: accept, speak HTTP, stop.

Hypercorn's own `serve` would do, but for one thing: it hands head, body and end of a response to
the transport one by one, and each becomes a system call and a packet. Here the writes of one turn
of the event loop leave together. Nothing that Hypercorn documents can change how it writes, so this
does what its `serve` does with the same `TCPServer`, which may change with any release:
pyproject.toml bounds the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any, Final, cast

import h11
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from starlette.types import ASGIApp

from trunkline.server import logs
from trunkline.server.config import HttpOptions
from trunkline.server.early_answers import LINGER_S, EarlyAnswers

BACKLOG: Final = 2048
_HEADER_BYTES: Final = 64 << 10
_CORK_BYTES: Final = 64 << 10  # a fuller buffer is written at once
_HANDSHAKE_S: Final = 10.0
_CLOSE_S: Final = 3.0  # connections that are still busy at the stop have this long


class CorkedWriter:
    """An `asyncio.StreamWriter` that gathers what is written until the event loop's next turn."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Write soon; the order is kept."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)
        self._size += len(data)
        if self._size >= _CORK_BYTES:
            self._flush()

    async def drain(self) -> None:
        """Wait while the peer reads too slowly."""
        await self._writer.drain()

    def _flush(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._pending, self._size = [], 0
            if not self._writer.is_closing():
                self._writer.write(data)

    def write_eof(self) -> None:
        """Say that nothing more will be written."""
        self._flush()
        self._writer.write_eof()

    def close(self) -> None:
        """Write what waits, and close."""
        self._flush()
        self._writer.close()

    async def wait_closed(self) -> None:
        """Return when the transport is closed."""
        await self._writer.wait_closed()

    def get_extra_info(self, name: str) -> Any:
        """As `StreamWriter.get_extra_info`."""
        return self._writer.get_extra_info(name)


class Connection(TCPServer):
    """One client's connection; ends when the client closes its side, or stops in mid-body.

    Hypercorn's own would stay, with its descriptor, until the time-out of idle connections: the
    task that waits for that keeps its task group open. A body of which nothing comes for that long
    would hold it for ever, and so would an HTTP/2 connection without a stream.

    It would also close at once after an answer that comes before the end of a body. What is unread
    then resets the connection, and a client that reads when it has sent everything sees no answer.
    So here the rest is read and thrown away first, for `LINGER_S`.
    """

    _has_ended = False
    _cut: asyncio.TimerHandle | None = None  # ends the time that is left to a refused client

    async def protocol_send(self, event: Event) -> None:
        """As Hypercorn's, but an ended connection stays so, and one in mid-body does not close."""
        if isinstance(event, Closed) and self._is_in_mid_message():
            if self._cut is None:
                self._cut = self.loop.call_later(LINGER_S, self.writer.close)
                with contextlib.suppress(NotImplementedError, OSError, RuntimeError):
                    self.writer.write_eof()  # TLS has none
        elif not (self._has_ended and isinstance(event, Updated)):
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            while not self.reader.at_eof():
                limit_s = self.config.keep_alive_timeout if self._owes_data() else None
                data = await asyncio.wait_for(self.reader.read(MAX_RECV), limit_s)
                if self._cut is None:
                    await self._handle(data)
        if self._cut is not None:
            self._cut.cancel()
        await self.protocol.handle(Closed())
        self._has_ended = True
        await self.idle_task.stop()
        protocol = self.protocol.protocol
        if not isinstance(protocol, H11Protocol):  # nobody empties its buffers any more
            for buffer in protocol.stream_buffers.values():
                await buffer.close()

    async def _handle(self, data: bytes) -> None:
        try:
            await self.protocol.handle(RawData(data))
        except KeyError as error:
            if isinstance(self.protocol.protocol, H11Protocol):
                raise
            # Of a stream that Hypercorn has forgotten, as it was to: `early_answers` has waited.
            logs.SERVER.warning("a client still sends %.0f s after its answer: cut off", LINGER_S)
            raise ConnectionAbortedError from error

    def _is_in_mid_message(self) -> bool:
        """Whether the client, which has its answer, goes on sending what nobody reads."""
        protocol = self.protocol.protocol
        return (
            isinstance(protocol, H11Protocol)
            and protocol.connection.their_state in (h11.SEND_BODY, h11.ERROR)
            and protocol.connection.our_state is not h11.SEND_BODY
            and not self.reader.at_eof()
        )

    def _owes_data(self) -> bool:
        """Whether it is the client's turn: mid-body in HTTP/1, without a stream in HTTP/2."""
        protocol = self.protocol.protocol
        if isinstance(protocol, H11Protocol):
            return protocol.connection.their_state is h11.SEND_BODY
        return not protocol.streams


async def listen(
    app: ASGIApp,
    listener: socket.socket,
    options: HttpOptions,
    stop: asyncio.Event,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve HTTP on a bound socket, which is taken over, until `stop` is set."""
    loop = asyncio.get_running_loop()
    config, context = _config(options), WorkerContext(None)
    wrapped = ASGIWrapper(cast(Any, EarlyAnswers(app)))
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        connections.add(task)
        task.add_done_callback(connections.discard)
        corked = cast(asyncio.StreamWriter, CorkedWriter(writer))
        with contextlib.suppress(asyncio.CancelledError):  # only `listen` cancels it
            await Connection(wrapped, loop, config, context, {}, reader, corked)

    is_local = listener.family == socket.AF_UNIX
    start = asyncio.start_unix_server if is_local else asyncio.start_server
    server = await start(
        connected,
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=_HANDSHAKE_S if tls else None,
        ssl_shutdown_timeout=_CLOSE_S if tls else None,
    )
    try:
        await stop.wait()
    finally:
        server.close()
        await context.terminated.set()  # idle connections close by themselves
        if connections:
            _, busy = await asyncio.wait(connections, timeout=_CLOSE_S)
            for task in busy:
                task.cancel()
            if busy:
                await asyncio.wait(busy)


def _config(options: HttpOptions) -> Config:
    config = Config()
    config.errorlog = logs.HYPERCORN
    config.include_server_header = False
    config.keep_alive_timeout = options.keep_alive_timeout_s
    config.keep_alive_max_requests = 1 << 62
    config.h11_max_incomplete_size = _HEADER_BYTES
    return config
