"""Stored files: which there are (SQLite) and their contents (`storage.py`), kept in step.

Contents come first and go last, so that a listed file can always be read.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from trunkline.engine.validation import RequestError
from trunkline.server.batches.database import Database, new_id
from trunkline.server.batches.records import (
    UNFINISHED,
    FileRecord,
    PageQuery,
    insert,
    record,
    select_page,
)
from trunkline.server.batches.storage import Storage

_ID: Final = re.compile(r"file-[0-9a-f]{32}", re.ASCII)
_LIVE: Final = "(expires_at IS NULL OR expires_at > ?)"
_IN_USE: Final = (
    "SELECT id FROM batches WHERE input_file_id = files.id "
    f"AND status IN ({', '.join(repr(one) for one in UNFINISHED)})"
)


def is_file_id(text: str) -> bool:
    """Whether a text has the form of a file's id."""
    return _ID.fullmatch(text) is not None


def new_file_id() -> str:
    """An id for a file to come."""
    return new_id("file-")


def missing_file(file_id: str, param: str | None = None) -> RequestError:
    """The error for an id that no file has (404)."""
    return RequestError(f"there is no file {file_id[:80]!r}.", param, status=404)


def find_file(connection: sqlite3.Connection, file_id: str) -> FileRecord | None:
    """A file that is there and has not expired; None if there is no such."""
    row = connection.execute(
        f"SELECT * FROM files WHERE id = ? AND {_LIVE}", (file_id, int(time.time()))
    ).fetchone()
    return None if row is None else record(FileRecord, row)


class FileStore:
    """The files of one storage directory."""

    def __init__(self, database: Database, storage: Storage) -> None:
        self._database = database
        self.storage = storage

    async def add(self, path: Path, one: FileRecord) -> None:
        """Take written contents and list them as `one`; both are on disk on return."""
        await asyncio.to_thread(self.storage.publish, path, one.id)
        await self._database.write(lambda connection: insert(connection, "files", one))

    async def get(self, file_id: str) -> FileRecord:
        """A file.

        Raises:
            RequestError: there is none with this id (404).
        """
        found = None
        if is_file_id(file_id):
            found = await self._database.read(lambda connection: find_file(connection, file_id))
        if found is None:
            raise missing_file(file_id)
        return found

    async def page(self, page: PageQuery, purpose: str | None) -> tuple[Sequence[FileRecord], bool]:
        """A page of the list, and whether there are more."""
        now = int(time.time())
        where, values = (_LIVE, [now]) if purpose is None else (
            f"{_LIVE} AND purpose = ?",
            [now, purpose],
        )  # fmt: skip
        rows, has_more = await self._database.read(
            lambda connection: select_page(connection, "files", page, where, values)
        )
        return [record(FileRecord, row) for row in rows], has_more

    async def open(self, file_id: str) -> tuple[FileRecord, BinaryIO]:
        """A file, and its contents to read.

        Raises:
            RequestError: there is none with this id (404).
        """
        one = await self.get(file_id)
        try:
            return one, self.storage.open(file_id)
        except FileNotFoundError as error:
            raise missing_file(file_id) from error

    async def delete(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            RequestError: there is none (404), or an unfinished batch reads it (409).
        """
        await self.get(file_id)

        def work(connection: sqlite3.Connection) -> None:
            row = connection.execute(
                f"SELECT ({_IN_USE}) FROM files WHERE id = ?", (file_id,)
            ).fetchone()
            if row is None:
                raise missing_file(file_id)
            if row[0] is not None:
                raise RequestError(
                    f"the file is the input of {row[0]}, which is not done; cancel that first.",
                    status=409,
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._database.write(work)
        await asyncio.to_thread(self.storage.remove, file_id)

    async def clean(self) -> None:
        """Remove files that have expired, and what a crash has left."""
        now = int(time.time())

        def expire(connection: sqlite3.Connection) -> tuple[list[str], set[str]]:
            gone = connection.execute(
                f"DELETE FROM files WHERE NOT {_LIVE} AND NOT EXISTS ({_IN_USE}) RETURNING id",
                (now,),
            ).fetchall()
            known = connection.execute("SELECT id FROM files")
            return [row[0] for row in gone], {row[0] for row in known}

        gone, known = await self._database.write(expire)
        for file_id in gone:
            await asyncio.to_thread(self.storage.remove, file_id)
        await asyncio.to_thread(self.storage.sweep, known)
