"""What a line becomes in the output or error file."""

from __future__ import annotations

from typing import Any, Final

import orjson

from trunkline.server.answer import Job
from trunkline.server.batches.lines import Line, line_id
from trunkline.server.batches.results import Answer
from trunkline.server.errors import ErrorBody, Failure, describe, error_body

# Outcome of a batch -> code and message for the lines that were not run.
UNANSWERED: Final = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was done."),
}

_LINE_BREAKS: Final = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode())
    for character in ("\x85", "\u2028", "\u2029")
)


def answered(batch_id: str, line: Line, job: Job, body: object, *, choices_object: bool) -> Answer:
    """The entry for an answer; with `choices_object` a single choice stands for itself."""
    response: dict[str, Any] = {"status_code": 200, "request_id": job.rid, "body": body}
    if job.ignored:
        response["ignored_fields"] = job.ignored
    usage: dict[str, Any] = {}
    if isinstance(body, dict):
        usage = body.get("usage") or {}
        choices = body.get("choices")
        if choices_object and isinstance(choices, list) and len(choices) == 1:
            response["body"] = {**body, "choices": choices[0]}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Answer(
        batch_id,
        line.number,
        False,
        _entry(batch_id, line.number, line.custom_id, response, None),
        int(usage.get("prompt_tokens", usage.get("input_tokens", 0))),
        int(details.get("cached_tokens", 0)),
        int(usage.get("completion_tokens", usage.get("output_tokens", 0))),
    )


def refused(batch_id: str, line: Line, failure: Failure) -> Answer:
    """The entry for a failure that a client would have been told with a status."""
    return _failed(batch_id, line, *describe(failure))


def broken(batch_id: str, line: Line) -> Answer:
    """The entry for an error of ours."""
    return _failed(batch_id, line, 500, error_body("the server failed; its log says why", 500))


def unanswered(batch_id: str, line: Line, outcome: str) -> Answer:
    """The entry for a line that was not run."""
    code, message = UNANSWERED[outcome]
    error = {"code": code, "message": message}
    text = _entry(batch_id, line.number, line.custom_id, None, error)
    return Answer(batch_id, line.number, True, text)


def _failed(batch_id: str, line: Line, status: int, body: ErrorBody) -> Answer:
    request_id = line_id(batch_id, line.number)
    response = {"status_code": status, "request_id": request_id, "body": body}
    text = _entry(batch_id, line.number, line.custom_id, response, None)
    return Answer(batch_id, line.number, True, text)


def _entry(batch_id: str, number: int, custom_id: str, response: object, error: object) -> bytes:
    entry = orjson.dumps(
        {
            "id": line_id(batch_id, number),
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )
    # Readers that split text at every Unicode line break would cut the entry there. In JSON these
    # characters are only in strings.
    for character, escape in _LINE_BREAKS:
        entry = entry.replace(character, escape)
    return entry
