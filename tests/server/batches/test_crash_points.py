"""A crash before and after everything that a batch puts on disk: nothing is lost or done twice.

A blown fuse stands for SIGKILL: from that moment on nothing more reaches the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.server.batches.harness import (
    add_batch,
    chat_line,
    check_answers,
    ended,
    jsonl,
    server_on,
)
from tests.server.fake_engine import FakeEngine

from trunkline.server.batches import crew, database, job, results, storage
from trunkline.server.batches.gate import Gate
from trunkline.server.batches.lease import Lease
from trunkline.server.batches.records import BatchRecord
from trunkline.server.state import Server

IDS = [f"id-{n}" for n in range(4)]
LINES = jsonl(chat_line(one, temperature=-1 if one == "id-3" else 1) for one in IDS)


class Crash(BaseException):
    """The process is no more."""


class Fuse:
    """Counts what is about to reach the disk; blows at a given count, and then every time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.burnt = 0
        transaction, publish = database._transaction, storage.Storage.publish

        def fused_transaction(
            connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], Any]
        ) -> Any:
            self.burn()
            value = transaction(connection, work)
            self.burn()
            return value

        def fused_publish(one: storage.Storage, path: Path, file_id: str) -> None:
            self.burn()
            publish(one, path, file_id)
            self.burn()

        monkeypatch.setattr(database, "_transaction", fused_transaction)
        monkeypatch.setattr(storage.Storage, "publish", fused_publish)

    def burn(self) -> None:
        self.burnt += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash

    @property
    def is_blown(self) -> bool:
        return self.left is not None and self.left < 0


async def until_the_crash(root: Path, fuse: Fuse, after: int, act: str) -> str:
    """Start a batch and let the server crash; the batch's id."""
    engine = FakeEngine(delay_s=0.001)
    with contextlib.suppress(Crash):
        async with server_on(root, engine, batch_concurrency=2) as server:
            batch_id = await add_batch(server, LINES)
            fuse.left = after
            if act == "cancel":
                asyncio.get_running_loop().call_later(0.01, cancel, server, batch_id)
            parts = await server.batches.opened()
            while not fuse.is_blown:
                with contextlib.suppress(Crash):
                    batch = await parts.store.get(batch_id)
                    if batch.status in ("completed", "cancelled"):
                        break
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.01)
    return batch_id


def cancel(server: Server, batch_id: str) -> None:
    async def work() -> None:
        parts = await server.batches.opened()
        with contextlib.suppress(Crash, Exception):
            await parts.store.cancel(batch_id)
            parts.worker.wake()

    task = asyncio.get_running_loop().create_task(work())
    cancelling.add(task)
    task.add_done_callback(cancelling.discard)


cancelling: set[asyncio.Task[None]] = set()


def count_results(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT COUNT(*) FROM results").fetchone()[0])


async def after_the_restart(root: Path, batch_id: str) -> str:
    """Let another server bring the batch to its end, and check it; its status."""
    with contextlib.closing(sqlite3.connect(root / storage.STATE_NAME)) as connection, connection:
        connection.execute("UPDATE lease SET expires_at = 0")  # the crashed one is this process too
    async with server_on(root, FakeEngine(), batch_concurrency=2) as server:
        batch = await ended(server, batch_id)
        if batch.in_progress_at is None:  # cancelled before its input was looked at
            assert (batch.status, batch.total) == ("cancelled", 0)
            return batch.status
        _, error = await check_answers(server, batch, IDS)
        if batch.status == "completed":
            assert [line["custom_id"] for line in error] == ["id-3"]
        parts = await server.batches.opened()
        async with asyncio.timeout(5):
            while await parts.database.read(count_results):
                await asyncio.sleep(0.002)
        return batch.status


@pytest.mark.parametrize("act", ["nothing", "cancel"])
def test_every_crash_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    fuse = Fuse(monkeypatch)
    endings: set[str] = set()
    points = 0
    while True:
        root = tmp_path / str(points)
        batch_id = asyncio.run(until_the_crash(root, fuse, points, act))
        was_reached = fuse.is_blown
        fuse.left = None
        endings.add(asyncio.run(after_the_restart(root, batch_id)))
        points += 1
        if not was_reached:
            break
    assert points > 12
    assert endings == ({"completed"} if act == "nothing" else {"completed", "cancelled"})


def test_what_a_crash_left_is_swept_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with server_on(tmp_path) as server:
            batch_id = await add_batch(server, LINES)
            batch = await ended(server, batch_id)
            parts = await server.batches.opened()
            old, new = tmp_path / "files" / "orphan", tmp_path / "incoming" / "fresh"
            part = tmp_path / "incoming" / "abandoned"
            for path in (old, new, part):
                path.write_bytes(b"x")
            for path in (old, part, tmp_path / "files" / batch.input_file_id):
                os.utime(path, (1, 1))
            await parts.files.clean()
            assert not old.exists()
            assert not part.exists()
            assert new.exists()
            assert (tmp_path / "files" / batch.input_file_id).exists()

    asyncio.run(main())


def test_answers_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = results.Results._store, [3]

    def full(one: results.Results, connection: sqlite3.Connection, rows: Any) -> None:
        store(one, connection, rows)
        if failures[0]:
            failures[0] -= 1
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(results.Results, "_store", full)
    monkeypatch.setattr(results, "_RETRY_S", 0.01)

    async def main() -> None:
        async with server_on(tmp_path) as server:
            batch = await ended(server, await add_batch(server, LINES))
            await check_answers(server, batch, IDS)
            assert failures == [0]

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_input_that_is_gone_fails_its_batch_alone(tmp_path: Path, when: str) -> None:
    async def main() -> None:
        engine = FakeEngine(delay_s=0.001)
        async with server_on(tmp_path, engine) as server:
            parts = await server.batches.opened()
            if when == "before":
                await parts.worker.stop()
            lost = await add_batch(server, LINES)
            if when == "after":
                while not engine.running:
                    await asyncio.sleep(0.001)
                await parts.worker.stop()
            parts.files.storage.remove((await parts.store.get(lost)).input_file_id)
            good = await add_batch(server, LINES)
        async with server_on(tmp_path) as server:
            batch = await ended(server, lost)
            assert batch.status == "failed"
            assert "missing_file" in (batch.errors or "")
            await check_answers(server, await ended(server, good), IDS)

    asyncio.run(main())


def test_a_job_that_fails_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[str] = []
    write = job.write_files

    async def failing(batch: BatchRecord, *rest: Any) -> Any:
        if batch.id in broken:
            broken.remove(batch.id)
            raise OSError("no such luck")
        return await write(batch, *rest)

    monkeypatch.setattr(job, "write_files", failing)
    monkeypatch.setattr(crew, "_REST_S", 0.5)

    async def main() -> None:
        async with server_on(tmp_path) as server:
            first = await add_batch(server, LINES)
            broken.append(first)
            second = await add_batch(server, LINES)
            await check_answers(server, await ended(server, second), IDS)
            assert broken == []
            parts = await server.batches.opened()
            assert (await parts.store.get(first)).status == "finalizing"
            await check_answers(server, await ended(server, first), IDS)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["run", "cancel"])
def test_who_is_stopped_at_any_moment_leaves_the_gate(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        engine = FakeEngine(delay_s=0)
        async with server_on(tmp_path, engine, batch_concurrency=2) as server:
            parts = await server.batches.opened()
            await parts.worker.stop()
            token = await parts.database.write(Lease().acquire)
            assert token is not None
            shop = job.Workshop(
                server=server,
                store=parts.store,
                files=parts.files,
                results=results.Results(parts.database, token),
                gate=Gate(lambda: 2),
                token=token,
            )
            for turns in range(0, 120, 7):
                one = job.BatchJob(await add_batch(server, LINES), shop)
                task = asyncio.create_task(one.run())
                for _ in range(turns):
                    await asyncio.sleep(0.0002)
                    if shop.gate.in_flight and turns % 2:
                        break
                if kind == "run":
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    one.cancel()
                    await task
                await asyncio.sleep(0)
                assert shop.gate.in_flight == 0

    asyncio.run(main())


def test_a_line_that_is_cancelled_before_it_begins_leaves_the_gate() -> None:
    async def main() -> None:
        gate = Gate(lambda: 1)

        async def line() -> None:
            raise AssertionError("it never begins")

        place = await gate.enter(1)
        task = asyncio.create_task(line())
        task.add_done_callback(partial(job._leave, place))
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert gate.in_flight == 0
        place.leave()
        assert gate.in_flight == 0

    asyncio.run(main())
