"""Errors in Anthropic's shape, and the keys of its clients: what stands around its endpoints."""

from __future__ import annotations

from typing import Any, Final

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.server.http import json_response

PREFIX: Final = "/v1/messages"
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_envelope(status: int, message: str) -> dict[str, Any]:
    """The body, or the event, for a failure with this HTTP status."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicEdge:
    """Lets Anthropic's clients in, and words errors as they expect them.

    `x-api-key` counts as a bearer token where there is no `Authorization`. Below `/v1/messages`,
    whatever answers with an error (this server's other layers too) has its body rewritten, and the
    request id is also in `request-id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["headers"] = _with_bearer(scope["headers"])
        if scope["path"] == PREFIX or scope["path"].startswith(f"{PREFIX}/"):
            send = _Rewriter(send)
        await self._app(scope, receive, send)


def _with_bearer(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    found = dict(headers)
    if b"x-api-key" not in found or b"authorization" in found:
        return headers
    return [*headers, (b"authorization", b"Bearer " + found[b"x-api-key"])]


class _Rewriter:
    """Passes a response on; the body of an error is collected, and sent in the other shape."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"] = list(message.get("headers", ()))
            headers += [
                (b"request-id", value) for name, value in headers if name == b"x-request-id"
            ]
            is_json = (b"content-type", b"application/json") in headers
            if message["status"] >= 400 and is_json:
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            message = await self._rewritten(self._start, message)
        await self._send(message)

    async def _rewritten(self, start: Message, end: Message) -> Message:
        self._start = None
        envelope = error_envelope(start["status"], orjson.loads(self._body)["message"])
        content = bytes(json_response(envelope).body)
        kept = [pair for pair in start["headers"] if pair[0] != b"content-length"]
        length = (b"content-length", str(len(content)).encode())
        await self._send({**start, "headers": [*kept, length]})
        return {**end, "body": content}
