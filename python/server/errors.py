"""Error bodies: OpenAI's nested object, with the flat keys of SGLang beside it."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from trunkline.engine.client import ControlFailed, EngineDied, RequestRefused
from trunkline.engine.validation import RequestError

RETRY_AFTER_S: Final = 1
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

# What a handler may raise and the client is told about.
Failure = RequestError | RequestRefused | EngineDied | ControlFailed
FAILURES: Final = (RequestError, RequestRefused, EngineDied, ControlFailed)


class ErrorDetail(TypedDict):
    """An error as OpenAI writes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """An error: OpenAI's object, and the same flat for older clients, with the status as `code`."""

    error: ErrorDetail
    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """The body that goes with `status`, also the payload of an SSE error event."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {"message": message, "type": kind, "param": param, "code": code},
        "object": "error",
        "message": message,
        "type": kind,
        "param": param,
        "code": status,
    }


def describe(failure: Failure) -> tuple[int, ErrorBody]:
    """HTTP status and body for a failure."""
    match failure:
        case RequestError():
            status, param, code = failure.status, failure.param, failure.code
            message = failure.message
        case RequestRefused():
            status, param, message = failure.status, failure.param, failure.message
            code = None if failure.kind == "invalid_request_error" else failure.kind
        case EngineDied():
            status, param, code = 503, None, "engine_unavailable"
            message = f"the engine cannot answer: {failure}"
        case ControlFailed():
            status, param, code, message = 400, None, None, str(failure)
    return status, error_body(message, status, param, code)
