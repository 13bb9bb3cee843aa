"""/v1/batches: create, list, retrieve, cancel."""

from __future__ import annotations

import re
import time
from typing import Any, Final

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from trunkline.engine.typed_bodies import convert
from trunkline.engine.validation import RequestError, shown
from trunkline.server.answer import ignored_headers
from trunkline.server.batches.database import new_id
from trunkline.server.batches.lines import LINE_KINDS
from trunkline.server.batches.records import BatchRecord, parse_page, shown_page
from trunkline.server.batches.service import opened
from trunkline.server.batches.store import is_batch_id
from trunkline.server.batches.upload import check_expiry
from trunkline.server.http import json_response, read_json
from trunkline.server.state import server_of

DEFAULT_LIMIT: Final = 20
MOST: Final = 100
WINDOW: Final = re.compile(r"([1-9][0-9]{0,7})([smhd])", re.ASCII)
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S: Final = 30 * 86400
METADATA: Final = (16, 64, 512)  # pairs, characters of a key, of a value


class BatchFields(msgspec.Struct, kw_only=True):
    """The body of a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


async def create_batch(request: Request) -> Response:
    """Take a batch; the answer goes out when it is on disk."""
    parts, server = await opened(request), server_of(request)
    body, _ = await read_json(request, server.config.http.max_body_bytes)
    fields, ignored = _parse(body)
    server.note_ignored(ignored)
    kept_s = None
    if fields.output_expires_after is not None:
        after = fields.output_expires_after
        kept_s = check_expiry(after.get("anchor"), after.get("seconds"), "output_expires_after")
    now = int(time.time())
    batch = BatchRecord(
        id=new_id("batch_"),
        endpoint=fields.endpoint,
        input_file_id=fields.input_file_id,
        completion_window=fields.completion_window,
        metadata=orjson.dumps(fields.metadata).decode(),
        output_expires_after_s=kept_s,
        created_at=now,
        expires_at=now + window_s(fields.completion_window),
    )
    await parts.store.create(batch)
    parts.worker.wake()
    return json_response(batch.shown(server.model.name), headers=ignored_headers(ignored))


def _parse(body: Any) -> tuple[BatchFields, list[str]]:
    """The typed body, checked, and the names of fields that are unknown.

    Raises:
        RequestError: a field is missing or wrong.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(body)}.")
    fields = convert(body, BatchFields)
    if fields.endpoint not in LINE_KINDS:
        raise RequestError(
            f"endpoint must be one of {', '.join(LINE_KINDS)}, got {fields.endpoint[:80]!r}.",
            "endpoint",
        )
    window_s(fields.completion_window)
    _check_metadata(fields.metadata or {})
    after = fields.output_expires_after or {}
    return fields, [
        *(name for name in body if name not in BatchFields.__struct_fields__),
        *(f"output_expires_after.{name}" for name in after if name not in ("anchor", "seconds")),
    ]


def window_s(text: str) -> int:
    """The seconds of a completion window such as 24h.

    Raises:
        RequestError: it is none, or longer than 30 days.
    """
    match = WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise RequestError(
            "completion_window must be a number and one of s, m, h, d, of at most 30d (24h, say), "
            f"got {text[:80]!r}.",
            "completion_window",
        )
    return seconds


def _check_metadata(metadata: dict[str, str]) -> None:
    pairs, key_chars, value_chars = METADATA
    if len(metadata) > pairs:
        raise RequestError(f"metadata has {len(metadata)} pairs, the limit is {pairs}.", "metadata")
    for key, value in metadata.items():
        if len(key) > key_chars or len(value) > value_chars:
            raise RequestError(
                f"metadata has a key of {len(key)} and value of {len(value)} characters, the "
                f"limits are {key_chars} and {value_chars}.",
                "metadata",
            )


async def list_batches(request: Request) -> Response:
    """A page of the batches, newest first unless asked otherwise."""
    page = parse_page(request.query_params, default=DEFAULT_LIMIT, most=MOST, is_id=is_batch_id)
    records, has_more = await (await opened(request)).store.page(page)
    model = server_of(request).model.name
    return json_response(shown_page([one.shown(model) for one in records], has_more))


async def get_batch(request: Request) -> Response:
    """One batch, with its counts as they stand."""
    batch = await (await opened(request)).store.get(request.path_params["batch_id"])
    return json_response(batch.shown(server_of(request).model.name))


async def cancel_batch(request: Request) -> Response:
    """Ask for a batch to be cancelled."""
    parts = await opened(request)
    batch = await parts.store.cancel(request.path_params["batch_id"])
    parts.worker.wake()
    return json_response(batch.shown(server_of(request).model.name))
