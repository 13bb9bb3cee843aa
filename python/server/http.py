"""Bodies in and out: JSON with its limits, and server-sent events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from trunkline.engine.validation import RequestError
from trunkline.server.errors import RETRY_AFTER_S, ErrorBody, Failure, describe, error_body

DONE: Final = b"data: [DONE]\n\n"
_CONSTANTS: Final = (b"NaN", b"Infinity")
_SEARCHED_BYTES: Final = 64 << 10  # of longer bodies only the place of a NaN is told, not the field
_MAX_PATH_CHARS: Final = 256

Path = tuple["Path", str] | None  # of a value in a document: that of its parent, and a step


async def read_json(request: Request, max_bytes: int) -> tuple[Any, int]:
    """Decode a JSON body of at most `max_bytes`; the document, and the bytes it came in.

    Raises:
        RequestError: it is not declared or written as JSON (400), or too long (413).
    """
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            f"Content-Type must be application/json, got {declared[:80]!r}.", "content-type"
        )
    body = await read_body(request, max_bytes)
    return decode_json(body), len(body)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a body of at most `max_bytes`.

    Raises:
        RequestError: it is longer (413).
    """
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_long(length, max_bytes)
    parts: list[bytes] = []
    total = 0
    async for part in request.stream():
        total += len(part)
        if total > max_bytes:
            raise _too_long(f"more than {max_bytes}", max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_long(length: str, max_bytes: int) -> RequestError:
    return RequestError(
        f"the body has {length} bytes, the limit is {max_bytes} (--max-body-bytes).", status=413
    )


def decode_json(body: bytes) -> Any:
    """Decode strict JSON.

    Raises:
        RequestError: it is none. A NaN or Infinity in a short one is reported with its field.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if len(body) <= _SEARCHED_BYTES and any(constant in body for constant in _CONSTANTS):
            _refuse_constants(body)
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _refuse_constants(body: bytes) -> None:
    """Raise for the first number in a document that is none; return if it is broken otherwise."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return
    pending: list[tuple[Path, Any]] = [(None, document)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            name = _name(path)
            words = f"{name or 'the body'} must be a finite number, got {value}."
            raise RequestError(words, name)
        if isinstance(value, dict):
            pending += [((path, f".{key[:80]}"), one) for key, one in value.items()]
        elif isinstance(value, list):
            pending += [((path, f"[{index}]"), one) for index, one in enumerate(value)]


def _name(path: Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps)).lstrip(".")[:_MAX_PATH_CHARS]


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def error_response(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> Response:
    """An error response; 503 says when to come again."""
    return _with_retry(status, error_body(message, status, param, code))


def failure_response(failure: Failure) -> Response:
    """The response for what a handler raised."""
    return _with_retry(*describe(failure))


def _with_retry(status: int, body: ErrorBody) -> Response:
    retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
    return json_response(body, status, retry)


def event_frames(payloads: Iterable[object]) -> bytes:
    """Server-sent events, one per payload."""
    return b"".join([b"data: " + orjson.dumps(payload) + b"\n\n" for payload in payloads])


def named_event_frames(payloads: Iterable[Mapping[str, object]]) -> bytes:
    """Server-sent events that bear the `type` of their payload as their name."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (str(payload["type"]).encode(), orjson.dumps(payload))
        for payload in payloads
    )
