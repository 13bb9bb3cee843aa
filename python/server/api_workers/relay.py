"""Requests for what only the first HTTP process has, handed on to it over a Unix socket.

Plain ASGI around an API worker's application. Bodies stream in both directions; a client that
leaves closes the connection to the first process, which sees it as its own client's leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.server.http import error_response
from trunkline.server.middleware import announces_body

KEPT: Final = ("/v1/files", "/v1/batches", "/v1/responses", "/metrics", "/abort_request")
_READ_BYTES: Final = 64 << 10
# They concern the connection to the client; h11 itself answers for ours.
_HOP: Final = frozenset((b"connection", b"keep-alive", b"te", b"upgrade", b"expect"))
# Of an answer: Hypercorn adds its own.
_OWN: Final = _HOP | {b"transfer-encoding", b"date"}
# Whose request it is: host and port, or empty. From anybody else than a worker it means nothing.
_CLIENT: Final = b"trunkline-client"


def is_kept(path: str) -> bool:
    """Whether the first process answers this path."""
    return any(path == one or path.startswith(one + "/") for one in KEPT)


class Relay:
    """Hands kept paths on, and all else to the worker's own application."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        """Wrap `app`; the first process listens at the Unix socket `path`."""
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_kept(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            response = error_response("the server's first process does not answer; try again", 503)
            await response(scope, receive, send)
            return
        exchange = _Exchange(reader, writer)
        try:
            await exchange.run(scope, receive, send)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Relayed:
    """The other end, around the first process's application: requests are their clients' again."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`, for a listener that only workers reach."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            client = b"".join(value for name, value in headers if name == _CLIENT).decode()
            host, _, port = client.rpartition(" ")
            scope["headers"] = [(name, value) for name, value in headers if name != _CLIENT]
            scope["client"] = (host, int(port)) if host else None
        await self._app(scope, receive, send)


class _Exchange:
    """One request on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._protocol = h11.Connection(h11.CLIENT)
        self._owes_body = False  # the client has announced more than it has sent

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on both ways until the answer is out or the client has left."""
        self._owes_body = announces_body(scope)
        await self._write(_head(scope))
        up = asyncio.create_task(self._upload(receive))
        down = asyncio.create_task(self._download(send))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            if not down.done() and up.done():
                down.cancel()
            results = await asyncio.gather(up, down, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _upload(self, receive: Receive) -> None:
        """Hand on the body; return when the client has left."""
        while (message := await receive())["type"] == "http.request":
            if body := message.get("body", b""):
                await self._write(h11.Data(data=body))
            if not message.get("more_body", False):
                self._owes_body = False
                await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Event) -> None:
        data = self._protocol.send(event)
        # It may have answered and closed before it has read all; what it said is still to be read.
        with contextlib.suppress(ConnectionError):
            self._writer.write(data or b"")
            await self._writer.drain()

    async def _download(self, send: Send) -> None:
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                headers = [(n, v) for n, v in event.headers if n not in _OWN]
                if self._owes_body:
                    headers.append((b"connection", b"close"))  # as `middleware.Edge` does
                await send(
                    {
                        "type": "http.response.start",
                        "status": event.status_code,
                        "headers": headers,
                    }
                )
            elif isinstance(event, h11.Data):
                body = bytes(event.data)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> h11.Event:
        """The next part of the answer.

        Raises:
            RemoteProtocolError: the first process has broken off.
        """
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(_READ_BYTES))
        if not isinstance(event, h11.Event):
            raise h11.RemoteProtocolError("the answer of the first process ended early")
        return event


def _head(scope: Scope) -> h11.Request:
    target = scope.get("raw_path") or scope["path"].encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    dropped = _HOP | {_CLIENT}
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    names = {name for name, _ in headers}
    if b"host" not in names:  # HTTP/1.0
        headers.append((b"host", b"localhost"))
    if not names & {b"content-length", b"transfer-encoding"} and scope["http_version"] == "2":
        headers.append((b"transfer-encoding", b"chunked"))  # it says nothing of a body beforehand
    if client := scope.get("client"):
        headers.append((_CLIENT, f"{client[0]} {client[1]}".encode()))
    headers.append((b"connection", b"close"))
    return h11.Request(method=scope["method"], target=target, headers=headers)
