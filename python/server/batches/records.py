"""Files and batches as they are stored, and as OpenAI's API shows them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from trunkline.engine.validation import RequestError

Record = TypeVar("Record", "FileRecord", "BatchRecord")

UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
PURPOSES: Final = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
OUTPUT_PURPOSE: Final = "batch_output"
ORDERS: Final = ("asc", "desc")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A stored file; the columns of `files`. Times are whole unix seconds."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """The file object of the API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch; the columns of `batches`.

    `outcome` is the status that it is to end with, once that is known. Counts and tokens grow with
    every stored answer.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str  # JSON
    output_expires_after_s: int | None
    status: str = "validating"
    outcome: str | None = None
    errors: str | None = None  # JSON
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def shown(self, model: str) -> dict[str, Any]:
        """The batch object of the API."""
        errors = None if self.errors is None else json.loads(self.errors)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": model,
            "errors": errors and {"object": "list", "data": errors},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": json.loads(self.metadata),
        }


def record(kind: type[Record], row: sqlite3.Row) -> Record:
    """The record of a whole row."""
    return kind(**dict(row))


def insert(connection: sqlite3.Connection, table: str, one: FileRecord | BatchRecord) -> None:
    """Add a record to its table."""
    names = [field.name for field in fields(one)]
    marks = ", ".join("?" * len(names))
    connection.execute(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})",
        [getattr(one, name) for name in names],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """Which part of a list is wanted: `limit` records in an order, those after the id `after`."""

    after: str | None
    limit: int
    ascending: bool = False


def parse_page(
    query: Mapping[str, str], *, default: int, most: int, is_id: Callable[[str], bool]
) -> PageQuery:
    """Read `after`, `limit` and `order` of a URL's query.

    Raises:
        RequestError: one of them is not usable.
    """
    limit, order = query.get("limit") or str(default), query.get("order") or "desc"
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 9
    if not is_number or not 1 <= int(limit) <= most:
        raise RequestError(f"limit must be an integer in [1, {most}], got {limit[:40]!r}.", "limit")
    if order not in ORDERS:
        raise RequestError(f"order must be asc or desc, got {order[:40]!r}.", "order")
    after = query.get("after") or None
    if after is not None and not is_id(after):
        raise RequestError(f"after must be the id of a list's entry, got {after[:80]!r}.", "after")
    return PageQuery(after=after, limit=int(limit), ascending=order == "asc")


def select_page(
    connection: sqlite3.Connection,
    table: str,
    page: PageQuery,
    where: str = "TRUE",
    values: Sequence[object] = (),
) -> tuple[list[sqlite3.Row], bool]:
    """The rows of a page, and whether there are more. Ids sort by the time of creation."""
    sign, order = (">", "ASC") if page.ascending else ("<", "DESC")
    after, start = ("TRUE", []) if page.after is None else (f"id {sign} ?", [page.after])
    rows = connection.execute(
        f"SELECT * FROM {table} WHERE {where} AND {after} ORDER BY id {order} LIMIT ?",
        [*values, *start, page.limit + 1],
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit


def shown_page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """The list object of the API."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
