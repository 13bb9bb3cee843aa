"""Batches in the database: every change of state is one transaction.

    validating -> in_progress -> finalizing -> completed | expired
    validating -> failed
    validating | in_progress -> cancelling -> cancelled

What the worker changes is fenced by its lease (`token`). Knows nothing of how lines are run.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Final

import orjson

from trunkline.engine.validation import RequestError
from trunkline.server.batches import lease
from trunkline.server.batches.database import Database
from trunkline.server.batches.files import find_file, is_file_id, missing_file
from trunkline.server.batches.lines import Problem
from trunkline.server.batches.records import (
    UNFINISHED,
    BatchRecord,
    FileRecord,
    PageQuery,
    insert,
    record,
    select_page,
)

_ID: Final = re.compile(r"batch_[0-9a-f]{32}", re.ASCII)
_UNFINISHED: Final = f"status IN ({', '.join(repr(one) for one in UNFINISHED)})"
_CLEARED_ROWS: Final = 500  # per transaction, so that nobody waits long


def is_batch_id(text: str) -> bool:
    """Whether a text has the form of a batch's id."""
    return _ID.fullmatch(text) is not None


class BatchStore:
    """The batches of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, batch: BatchRecord) -> None:
        """Add a batch; it is on disk on return.

        Raises:
            RequestError: its input is no file (404), or not one for batches.
        """

        def work(connection: sqlite3.Connection) -> None:
            file_id = batch.input_file_id
            file = find_file(connection, file_id) if is_file_id(file_id) else None
            if file is None:
                raise missing_file(file_id, "input_file_id")
            if file.purpose != "batch":
                raise RequestError(
                    f"the file {file_id} has the purpose {file.purpose}, it must be batch.",
                    "input_file_id",
                )
            insert(connection, "batches", batch)

        await self._database.write(work)

    async def get(self, batch_id: str) -> BatchRecord:
        """A batch.

        Raises:
            RequestError: there is none with this id (404).
        """
        if not is_batch_id(batch_id):
            raise _missing(batch_id)
        return await self._database.read(lambda connection: _get(connection, batch_id))

    async def page(self, page: PageQuery) -> tuple[Sequence[BatchRecord], bool]:
        """A page of the list, and whether there are more."""
        rows, has_more = await self._database.read(
            lambda connection: select_page(connection, "batches", page)
        )
        return [record(BatchRecord, row) for row in rows], has_more

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Ask for a batch to be cancelled; the batch as it is now. Asking twice is no error.

        Raises:
            RequestError: there is none (404), or it is past being cancelled (409).
        """
        if not is_batch_id(batch_id):
            raise _missing(batch_id)

        def work(connection: sqlite3.Connection) -> BatchRecord:
            batch = _get(connection, batch_id)
            if batch.status == "cancelling":
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise RequestError(
                    f"the batch is {batch.status}; only one that is validating or in_progress can "
                    "be cancelled.",
                    status=409,
                )
            _update(connection, batch_id, status="cancelling", cancelling_at=int(time.time()))
            return _get(connection, batch_id)

        return await self._database.write(work)

    async def unfinished(self, limit: int) -> list[BatchRecord]:
        """Batches that are not at their end: first those that need no more lines, then by age."""
        now = int(time.time())
        rows = await self._database.read(
            lambda connection: connection.execute(
                f"SELECT * FROM batches WHERE {_UNFINISHED} "
                "ORDER BY status = 'cancelling' OR expires_at <= ? DESC, id LIMIT ?",
                (now, limit),
            ).fetchall()
        )
        return [record(BatchRecord, row) for row in rows]

    async def begin(self, token: int, batch_id: str, total: int) -> None:
        """The input was found to be good: start on its lines, unless it was cancelled meanwhile."""

        def work(connection: sqlite3.Connection) -> None:
            lease.check(connection, token)
            now = int(time.time())
            is_wanted = _get(connection, batch_id).status == "validating"
            status = "in_progress" if is_wanted else "cancelling"
            _update(connection, batch_id, status=status, total=total, in_progress_at=now)

        await self._database.write(work)

    async def fail(self, token: int, batch_id: str, problems: Iterable[Problem]) -> None:
        """End a batch that cannot be run."""
        errors = orjson.dumps([one.shown() for one in problems]).decode()

        def work(connection: sqlite3.Connection) -> None:
            lease.check(connection, token)
            now = int(time.time())
            _update(connection, batch_id, status="failed", errors=errors, failed_at=now)

        await self._database.write(work)

    async def conclude(self, token: int, batch_id: str, outcome: str) -> None:
        """No more lines are run; `outcome` is how the batch ends, unless it is being cancelled."""

        def work(connection: sqlite3.Connection) -> None:
            lease.check(connection, token)
            if _get(connection, batch_id).status == "cancelling":
                _update(connection, batch_id, outcome="cancelled")
            else:
                now = int(time.time())
                _update(
                    connection, batch_id, status="finalizing", outcome=outcome, finalizing_at=now
                )

        await self._database.write(work)

    async def finish(
        self, token: int, batch: BatchRecord, output: FileRecord | None, error: FileRecord | None
    ) -> None:
        """The end of a batch, with its files, whose contents are on disk."""
        assert batch.outcome is not None, "a batch is concluded before it is finished"
        outcome = batch.outcome

        def work(connection: sqlite3.Connection) -> None:
            lease.check(connection, token)
            for file in (output, error):
                if file is not None:
                    insert(connection, "files", file)
            _update(
                connection,
                batch.id,
                status=outcome,
                output_file_id=None if output is None else output.id,
                error_file_id=None if error is None else error.id,
                **{f"{outcome}_at": int(time.time())},
            )

        await self._database.write(work)

    async def clear_results(self) -> None:
        """Remove the stored answers of batches that are at their end: their files have them."""

        def work(connection: sqlite3.Connection) -> int:
            row = connection.execute(
                "SELECT batch_id FROM results JOIN batches ON batches.id = batch_id "
                f"WHERE NOT {_UNFINISHED} LIMIT 1"
            ).fetchone()
            if row is None:
                return 0
            cleared = connection.execute(
                "DELETE FROM results WHERE rowid IN "
                "(SELECT rowid FROM results WHERE batch_id = ? LIMIT ?)",
                (row[0], _CLEARED_ROWS),
            ).rowcount
            connection.execute("PRAGMA incremental_vacuum").fetchall()
            return cleared

        while await self._database.write(work):
            pass


def _missing(batch_id: str) -> RequestError:
    return RequestError(f"there is no batch {batch_id[:80]!r}.", status=404)


def _get(connection: sqlite3.Connection, batch_id: str) -> BatchRecord:
    row = connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise _missing(batch_id)
    return record(BatchRecord, row)


def _update(connection: sqlite3.Connection, batch_id: str, **values: str | int | None) -> None:
    sets = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE batches SET {sets} WHERE id = ?", [*values.values(), batch_id])
