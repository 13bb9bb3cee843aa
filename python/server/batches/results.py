"""Answers of lines, each stored once, many per transaction.

An answer counts when its transaction is on disk; counts and answers change together. Answers wait
here, not at the database: all that came in during one write leave with the next.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Final, NamedTuple

from trunkline.server import logs
from trunkline.server.batches import lease
from trunkline.server.batches.database import Database

_RETRY_S: Final = 5.0
_SETTLE_S: Final = 10.0
_PAGE_ROWS: Final = 64


class Answer(NamedTuple):
    """One line of an output or error file, without its newline, and the tokens that it took."""

    batch_id: str
    line: int
    is_error: bool
    text: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Results:
    """The stored answers, written under one grant of the lease."""

    def __init__(self, database: Database, token: int) -> None:
        self._database = database
        self._token = token
        self._waiting: list[tuple[Answer, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def save(self, answer: Answer) -> None:
        """Store an answer, unless its line has one; on disk on return.

        Waits while the disk is full. Who is cancelled here does not take the answer back.

        Raises:
            LeaseLost: another process works on the batches now.
        """
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, stored))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())
        await stored

    async def save_many(self, answers: Sequence[Answer]) -> None:
        """Store answers as `save` does, after those that wait."""
        await self.settle()
        await self._database.write(lambda connection: self._store(connection, answers))

    async def settle(self) -> None:
        """Return when nothing waits any more, or the disk takes too long."""
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=_SETTLE_S)

    async def answered(self, batch_id: str, first: int, last: int) -> set[int]:
        """Which lines from `first` to `last` have an answer."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT line FROM results WHERE batch_id = ? AND line BETWEEN ? AND ?",
                (batch_id, first, last),
            ).fetchall()
        )
        return {row[0] for row in rows}

    async def page(self, batch_id: str, after: int) -> list[tuple[int, bool, bytes]]:
        """The next answers in the order of lines: number, whether an error, text."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT line, is_error, answer FROM results WHERE batch_id = ? AND line > ? "
                "ORDER BY line LIMIT ?",
                (batch_id, after, _PAGE_ROWS),
            ).fetchall()
        )
        return [(row[0], bool(row[1]), row[2]) for row in rows]

    async def _write(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                await self._write_group(group)
        finally:
            self._writer = None

    async def _write_group(self, group: list[tuple[Answer, asyncio.Future[None]]]) -> None:
        answers = [answer for answer, _ in group]
        while True:
            try:
                await self._database.write(lambda connection: self._store(connection, answers))
            except sqlite3.OperationalError as error:
                logs.SERVER.error("answers of batches cannot be stored, trying again: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            except Exception as error:
                for _, stored in group:
                    if not stored.done():
                        stored.set_exception(error)
                return
            for _, stored in group:
                if not stored.done():
                    stored.set_result(None)
            return

    def _store(self, connection: sqlite3.Connection, answers: Sequence[Answer]) -> None:
        lease.check(connection, self._token)
        for one in answers:
            added = connection.execute(
                "INSERT INTO results VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (one.batch_id, one.line, one.is_error, one.text),
            ).rowcount
            if added:
                connection.execute(
                    "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
                    "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
                    "output_tokens = output_tokens + ? WHERE id = ?",
                    (
                        int(not one.is_error),
                        int(one.is_error),
                        one.input_tokens,
                        one.cached_tokens,
                        one.output_tokens,
                        one.batch_id,
                    ),
                )
