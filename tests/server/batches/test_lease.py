"""The lease: one holder at a time, and no write of one that has lost it."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.batches.harness import (
    add_batch,
    chat_line,
    check_answers,
    ended,
    jsonl,
    server_on,
)
from tests.server.fake_engine import FakeEngine

from trunkline.server.batches import lease
from trunkline.server.batches.database import Database, _connect
from trunkline.server.batches.lease import LEASE_S, Lease, LeaseLost
from trunkline.server.batches.results import Answer, Results


def identity(name: str) -> str:
    return json.dumps(["another machine", 1, 1, name])


@pytest.fixture
def connection(tmp_path: Path) -> sqlite3.Connection:
    return _connect(tmp_path / "state.sqlite3")


def test_one_holder_at_a_time(connection: sqlite3.Connection) -> None:
    now = [1000.0]
    first, second = (Lease(lambda: now[0], identity(name)) for name in "ab")
    token = first.acquire(connection)
    assert token is not None
    assert second.acquire(connection) is None
    now[0] += LEASE_S - 1
    first.renew(connection, token)
    now[0] += LEASE_S - 1
    assert second.acquire(connection) is None
    now[0] += 1
    other = second.acquire(connection)
    assert other is not None
    assert other > token
    for act in (lease.check, first.renew):
        with pytest.raises(LeaseLost):
            act(connection, token)
    first.release(connection, token)
    lease.check(connection, other)
    second.release(connection, other)
    with pytest.raises(LeaseLost):
        lease.check(connection, other)
    assert first.acquire(connection) is not None
    connection.close()


def test_a_holder_that_is_no_more_is_followed_at_once(
    connection: sqlite3.Connection, tmp_path: Path
) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from trunkline.server.batches.database import _connect\n"
        "from trunkline.server.batches.lease import Lease\n"
        "connection = _connect(Path(sys.argv[1]))\n"
        "print(Lease().acquire(connection), flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "state.sqlite3")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ},
    )
    with child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) > 0
        assert Lease().acquire(connection) is None
        child.kill()
    assert Lease().acquire(connection) is not None
    connection.close()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["acquire", "renew", "release", "wait"])))
)
def test_against_a_model(
    steps: list[tuple[int, str]],
) -> None:
    connection = _connect(Path(":memory:"))
    now = [0.0]
    leases = [Lease(lambda: now[0], identity(str(n))) for n in range(3)]
    tokens: dict[int, int] = {}
    holder: int | None = None
    until = 0.0
    for who, act in steps:
        if act == "wait":
            now[0] += LEASE_S / 2
        elif act == "acquire":
            token = leases[who].acquire(connection)
            assert (token is not None) == (holder in (None, who) or until <= now[0])
            if token is not None:
                assert all(token > other for other in tokens.values())
                tokens[who], holder, until = token, who, now[0] + LEASE_S
        elif who in tokens and act == "renew":
            if holder == who:
                leases[who].renew(connection, tokens[who])
                until = now[0] + LEASE_S
            else:
                with pytest.raises(LeaseLost):
                    leases[who].renew(connection, tokens[who])
        elif who in tokens:
            leases[who].release(connection, tokens[who])
            holder = None if holder == who else holder
    connection.close()


def test_answers_of_a_lost_lease_are_not_stored(tmp_path: Path) -> None:
    async def main() -> None:
        database = await Database.open(tmp_path / "state.sqlite3")
        token = await database.write(Lease(identity=identity("a")).acquire)
        assert token is not None
        results = Results(database, token)
        await results.save(Answer("b", 1, False, b"{}"))
        await database.write(Lease(lambda: 1e12, identity("b")).acquire)
        with pytest.raises(LeaseLost):
            await results.save(Answer("b", 2, False, b"{}"))
        assert await results.answered("b", 1, 9) == {1}
        await database.close()

    asyncio.run(main())


def test_two_servers_share_a_storage(tmp_path: Path) -> None:
    async def main() -> None:
        engines = FakeEngine(delay_s=0.001), FakeEngine(delay_s=0.001)
        async with server_on(tmp_path, engines[0]) as one, server_on(tmp_path, engines[1]) as two:
            ids = [f"id-{n}" for n in range(100)]
            batches = [
                await add_batch(server, jsonl(chat_line(name) for name in ids))
                for server in (one, two, one, two)
            ]
            for batch_id in batches:
                await check_answers(two, await ended(two, batch_id), ids)
            assert sum(len(engine.submitted) for engine in engines) == 400

    asyncio.run(main())


def test_another_server_takes_over_and_hears_of_a_cancel(tmp_path: Path) -> None:
    async def main() -> None:
        ids = [f"id-{n}" for n in range(300)]
        first, second = FakeEngine(delay_s=0.002), FakeEngine(delay_s=0.002)
        async with server_on(tmp_path, second, batch_concurrency=2) as two:
            async with server_on(tmp_path, first, batch_concurrency=2) as one:
                batch_id = await add_batch(one, jsonl(chat_line(name) for name in ids))
                while len(first.submitted) < 10:
                    await asyncio.sleep(0.01)
                assert second.submitted == []
            (await two.batches.opened()).worker.wake()
            while len(second.submitted) < 10:
                await asyncio.sleep(0.01)
            async with server_on(tmp_path, FakeEngine()) as three:
                await (await three.batches.opened()).store.cancel(batch_id)
                batch = await ended(three, batch_id)
                assert batch.status == "cancelled"
                output, _ = await check_answers(three, batch, ids)
                assert len(output) >= 10

    asyncio.run(main())
