"""Around every request: request id, access log, HTTP metrics, authentication, draining.

Plain ASGI, so that streams pass through untouched. Knows nothing of the endpoints.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.server import logs
from trunkline.server.early_answers import Body
from trunkline.server.http import error_response
from trunkline.server.keys import Keys
from trunkline.server.load import HEADER as LOAD_HEADER
from trunkline.server.metrics import Metrics
from trunkline.server.route import Route, find

REQUEST_ID: Final = "trunkline.request_id"
OWN_REQUEST: Final = "trunkline.own_request"  # in the scope of what the server asks itself
_ACCESS: Final = "trunkline.access"
_IS_CLIENT: Final = "trunkline.is_client"
_MAX_ID_BYTES: Final = 128
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
_OTHER: Final = "other"


class Edge:
    """The application's own outermost layer: every response passes, that of a failure too."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        routes: Sequence[Route],
        load: Callable[[], bytes] | None,
    ) -> None:
        """Wrap `app`.

        Metrics name the paths of `routes` and the usual methods, others count as "other": a client
        cannot add to their number. `load` gives the value of the load header, which goes to who may
        call as a client.
        """
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = uuid.uuid4().hex
        route, takes_method = find(self._routes, scope)
        scope[_ACCESS] = route.access if route is not None and takes_method else "client"
        metrics, label = self._metrics, _OTHER if route is None else route.path
        exchange = _Exchange(scope, send, Body(receive), metrics, label, self._load)
        self._metrics.http_active += 1
        try:
            await self._app(scope, exchange.body.receive, exchange.send)
        except Exception:
            if exchange.started:
                raise
            logs.SERVER.exception("a request failed in the server")
            response = error_response("the server failed; its log says why", 500)
            await response(scope, exchange.body.receive, exchange.send)
        finally:
            self._metrics.http_active -= 1


class _Exchange:
    """The response side of one request."""

    def __init__(
        self,
        scope: Scope,
        send: Send,
        body: Body,
        metrics: Metrics,
        endpoint: str,
        load: Callable[[], bytes] | None,
    ) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._endpoint = endpoint
        self._method = scope["method"] if scope["method"] in _METHODS else _OTHER
        self._load = load
        self.body = body
        self.started = False
        metrics.count("http_requests_total", 1, endpoint, self._method)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        await self._send(message)

    def _start(self, message: Message) -> None:
        self.started = True
        message["headers"] = [
            *message.get("headers", ()),
            (b"x-request-id", _request_id(self._scope)),
        ]
        if self._load is not None and _IS_CLIENT in self._scope:
            message["headers"].append((LOAD_HEADER, self._load()))
        if not self.body.is_complete and announces_body(self._scope):
            # Unless all of it is there by then, the connection closes after the response: a client
            # that is not told would send its next request into the void.
            message["headers"].append((b"connection", b"close"))
        logs.access(self._scope, message["status"])
        self._metrics.count(
            "http_responses_total",
            1,
            self._endpoint,
            str(message["status"]),
            self._method,
        )


def _request_id(scope: Scope) -> bytes:
    """The client's `x-request-id` if it is a short printable word, else the server's."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_ID_BYTES and _is_printable(value):
            return bytes(value)
    return str(scope[REQUEST_ID]).encode()


def announces_body(scope: Scope) -> bool:
    """Whether an HTTP/1 request says that it has a body."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    has_body = length != b"0" or b"transfer-encoding" in headers
    return has_body and str(scope["http_version"]).startswith("1")


def _is_printable(value: bytes) -> bool:
    return all(0x21 <= byte <= 0x7E for byte in value)


class Guard:
    """Turns away who has no key, and new work while the server drains."""

    def __init__(self, app: ASGIApp, keys: Keys, is_draining: Callable[[], bool]) -> None:
        """Wrap `app`; `Edge` must stand around it, and says which keys a request needs."""
        self._app = app
        self._keys = keys
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            response = self._refusal(scope)
            if response is not None:
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["method"] == "OPTIONS" or OWN_REQUEST in scope:
            return None
        access, key = scope[_ACCESS], given_key(scope)
        refused = self._keys.refusal(access, key)
        if refused is not None:
            status, why = refused
            response = error_response(why, status, code="invalid_api_key")
            if status == 401:
                response.headers["www-authenticate"] = "Bearer"
            return response
        if access != "public" or self._keys.refusal("client", key) is None:
            scope[_IS_CLIENT] = True
        if self._is_draining() and scope["method"] in ("POST", "PUT"):
            return error_response("the server is shutting down", 503)
        return None


def given_key(scope: Scope) -> str:
    """The key that a request brings: as a bearer token, else as Anthropic's clients send it."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return given.decode("utf-8", "surrogateescape")
