"""Around everything that answers: what is left of a body that nobody reads is read away.

Plain ASGI. Hypercorn waits in `send` for room in the queue of a body's parts, which an application
that answers early no longer empties. Over HTTP/2 it also forgets a stream with the end of its
answer, and what then comes of the body ends the connection, with every other request on it: so
there the end waits until the client has sent everything.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S: Final = 30.0  # a client that is still sending has this long to see its answer


class Body:
    """Follows how far a request's body was read, and can read the rest away."""

    def __init__(self, receive: Receive) -> None:
        """Follow what `receive` gives."""
        self._receive = receive
        self.is_complete = False

    async def receive(self) -> Message:
        """The next message."""
        message = await self._receive()
        self.is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read to the end, or until the client has left."""
        while not self.is_complete:
            await self.receive()


class EarlyAnswers:
    """The outermost layer of a listener's application."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = Body(receive)
        drain: asyncio.Task[None] | None = None

        async def forward(message: Message) -> None:
            nonlocal drain
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and not body.is_complete:
                drain = asyncio.create_task(body.discard())
                if scope["http_version"] == "2":
                    await send({**message, "more_body": True})
                    await asyncio.wait((drain,), timeout=LINGER_S)
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await self._app(scope, body.receive, forward)
        finally:
            if drain is not None:
                drain.cancel()
