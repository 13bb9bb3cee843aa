"""The SQLite database of files and batches: a connection that writes and one that reads.

Each has a thread of its own, so that the event loop waits for neither, and a reader for no writer.
Every piece of work is one transaction. A write that has returned is on the disk (WAL,
synchronous=FULL). Knows the schema; nothing of what is done with it.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

Value = TypeVar("Value")

_VERSION: Final = 1
_BUSY_S: Final = 30.0  # other processes hold the database for milliseconds
_SCHEMA: Final = """
CREATE TABLE files (
    id TEXT PRIMARY KEY,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
) STRICT;
CREATE TABLE batches (
    id TEXT PRIMARY KEY,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    output_expires_after_s INTEGER,
    status TEXT NOT NULL,
    outcome TEXT,
    errors TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE results (
    batch_id TEXT NOT NULL,
    line INTEGER NOT NULL,
    is_error INTEGER NOT NULL,
    answer BLOB NOT NULL,
    PRIMARY KEY (batch_id, line)
) STRICT;
CREATE TABLE lease (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    token INTEGER NOT NULL,
    holder TEXT,
    expires_at REAL NOT NULL
) STRICT;
INSERT INTO lease VALUES (1, 0, NULL, 0);
"""


class _Owner:
    """A connection and the thread that alone uses it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def open(self, path: Path) -> None:
        try:
            self._connection = await self._call(lambda: _connect(path))
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    async def run(self, work: Callable[[sqlite3.Connection], Value]) -> Value:
        return await self._call(lambda: work(self._connection))

    async def close(self) -> None:
        await self._call(self._connection.close)
        self._thread.shutdown()

    async def _call(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Database:
    """Runs transactions that write one after another, and beside them those that read.

    A caller that is cancelled does not undo its transaction: work must be safe to do twice.
    """

    def __init__(self, writer: _Owner, reader: _Owner) -> None:
        self._writer = writer
        self._reader = reader

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Open the database, and create it if there is none.

        Raises:
            sqlite3.Error: it cannot be opened, or is another version's.
        """
        writer, reader = _Owner("batches-write"), _Owner("batches-read")
        await writer.open(path)
        try:
            await reader.open(path)
        except BaseException:
            await writer.close()
            raise
        return cls(writer, reader)

    async def write(self, work: Callable[[sqlite3.Connection], Value]) -> Value:
        """Run `work` in a transaction that is on disk on return, or undone if it raises.

        Raises:
            sqlite3.OperationalError: the disk is full, or another process did not end its own
                transaction in time.
        """
        return await self._writer.run(lambda connection: _transaction(connection, work))

    async def read(self, work: Callable[[sqlite3.Connection], Value]) -> Value:
        """Run `work`, which only reads, on one state of the database; waits for no writer."""
        return await self._reader.run(lambda connection: _snapshot(connection, work))

    async def close(self) -> None:
        """Let go of the database after what is under way."""
        await self._reader.close()
        await self._writer.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        _transaction(connection, _create)
    except BaseException:
        connection.close()
        raise
    return connection


def _create(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in _SCHEMA.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    elif version != _VERSION:
        raise sqlite3.DatabaseError(
            f"its layout has version {version}, this server knows version {_VERSION}"
        )


def _transaction(
    connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], Value]
) -> Value:
    connection.execute("BEGIN IMMEDIATE")
    try:
        value = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return value


def _snapshot(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], Value]) -> Value:
    connection.execute("BEGIN")
    try:
        return work(connection)
    finally:
        connection.execute("COMMIT")


def new_id(prefix: str) -> str:
    """An id that sorts by the time it was made, so that a page can begin after a deleted one."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"
