"""SIGKILL at random moments: a real server, its engine, and the middle of writing the files."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.checkpoints import TinyCheckpoint
from tests.server.batches.harness import CHAT, chat_line, jsonl
from tests.server.process import READY, Process

from trunkline.server.batches.lease import LEASE_S

ENDS = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyCheckpoint().write(tmp_path_factory.mktemp("model"))


class Servers:
    """One server after another over the same storage."""

    def __init__(self, model: Path, storage: Path) -> None:
        self._model = model
        self.storage = storage
        self.now = self._start()

    def _start(self) -> Process:
        flags = ("--file-storage-path", str(self.storage), "--batch-concurrency", "8")
        process = Process(self._model, *flags, "--skip-server-warmup")
        process.wait_for(READY)
        return process

    def kill(self) -> None:
        """SIGKILL the server; its engine ends by itself."""
        children = self.now.children
        self.now.process.send_signal(signal.SIGKILL)
        self.now.process.wait(10)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        self.now.close()

    def restart(self) -> None:
        self.now = self._start()

    def kill_engine(self) -> None:
        for child in self.now.children:
            if any("trunkline.engine.process" in word for word in child.cmdline()):
                child.kill()

    def state(self, sql: str, *values: Any) -> Any:
        """One value of the database, read beside the server."""
        with closing(
            sqlite3.connect(f"file:{self.storage}/state.sqlite3?mode=ro", uri=True)
        ) as one:
            row = one.execute(sql, values).fetchone()
            return None if row is None else row[0]

    def batch(self, batch_id: str) -> dict[str, Any]:
        response = self.now.http.get(f"/v1/batches/{batch_id}")
        assert response.status_code == 200, response.text
        return response.json()

    def start_batch(self, lines: int, **body: Any) -> str:
        content = jsonl(chat_line(f"id-{n}", f"number {n}", **body) for n in range(lines))
        file = self.now.http.post("/v1/files", files={"file": content}).json()
        batch = self.now.http.post(
            "/v1/batches",
            json={"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"},
        )
        assert batch.status_code == 200, batch.text
        return batch.json()["id"]

    def wait(self, until: Callable[[], Any], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "\n".join(self.now.lines[-20:])
            time.sleep(0.01)

    def check(self, batch_id: str, lines: int) -> None:
        """Wait for the end; every line is answered once, in order, and nothing else is kept."""
        self.wait(lambda: self.batch(batch_id)["status"] in ENDS)
        batch = self.batch(batch_id)
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
        text = self.now.http.get(f"/v1/files/{batch['output_file_id']}/content").text
        answers = [json.loads(line) for line in text.splitlines()]
        assert [one["custom_id"] for one in answers] == [f"id-{n}" for n in range(lines)]
        tokens = sum(one["response"]["body"]["usage"]["total_tokens"] for one in answers)
        assert batch["usage"]["total_tokens"] == tokens
        listed = self.now.http.get("/v1/files").json()["data"]
        assert sorted(one["purpose"] for one in listed) == ["batch", "batch_output"]
        self.wait(lambda: self.state("SELECT COUNT(*) FROM results") == 0)
        assert self.state("PRAGMA integrity_check") == "ok"


@pytest.fixture
def servers(model: Path, tmp_path: Path) -> Iterator[Servers]:
    one = Servers(model, tmp_path / "storage")
    try:
        yield one
    finally:
        one.now.close()


def answered(servers: Servers) -> int:
    return int(servers.state("SELECT COALESCE(MAX(completed + failed), 0) FROM batches"))


def kill_at_random(servers: Servers, kills: int, lines: int) -> None:
    batch_id = servers.start_batch(lines, max_tokens=8, ignore_eos=True)
    for kill in range(kills):
        goal = random.randint(0, lines // kills) + lines * kill // kills
        servers.wait(lambda goal=goal: answered(servers) >= goal)
        time.sleep(random.random() * 0.05)
        servers.kill()
        servers.restart()
    servers.check(batch_id, lines)


def test_a_killed_server_loses_nothing(servers: Servers) -> None:
    kill_at_random(servers, kills=2, lines=300)


@pytest.mark.slow
def test_a_server_that_is_killed_again_and_again(servers: Servers) -> None:
    kill_at_random(servers, kills=12, lines=1200)


def test_a_killed_engine_loses_nothing(servers: Servers) -> None:
    lines = 300
    batch_id = servers.start_batch(lines, max_tokens=8, ignore_eos=True)
    for goal in (10, 150):
        servers.wait(lambda goal=goal: answered(servers) >= goal)
        servers.kill_engine()
    servers.check(batch_id, lines)


@pytest.mark.slow
def test_killed_while_the_files_are_written(servers: Servers) -> None:
    lines, status = 3000, "SELECT status FROM batches WHERE id = ?"
    for delay_s in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2):
        batch_id = servers.start_batch(lines, max_tokens=1)
        servers.wait(lambda batch_id=batch_id: servers.state(status, batch_id) != "validating")
        servers.wait(
            lambda batch_id=batch_id: servers.state(status, batch_id) in ("finalizing", *ENDS), 300
        )
        time.sleep(delay_s)
        servers.kill()
        servers.restart()
        servers.check(batch_id, lines)
        for file in servers.now.http.get("/v1/files").json()["data"]:
            assert servers.now.http.delete(f"/v1/files/{file['id']}").status_code == 200


@pytest.mark.slow
def test_another_server_takes_over_from_a_killed_one(model: Path, tmp_path: Path) -> None:
    first, second = Servers(model, tmp_path / "storage"), Servers(model, tmp_path / "storage")
    try:
        batch_id = first.start_batch(300, max_tokens=8, ignore_eos=True)
        first.wait(lambda: answered(first) >= 50)
        first.kill()
        began = time.monotonic()
        second.wait(lambda: second.batch(batch_id)["request_counts"]["completed"] > 150)
        assert time.monotonic() - began < LEASE_S  # it need not wait for the lease to lapse
        second.check(batch_id, 300)
    finally:
        first.now.close()
        second.now.close()


def suspend_between_transactions(servers: Servers) -> list[psutil.Process]:
    """Stop a server and its engine; one that is stopped in a transaction keeps others waiting."""
    processes = [psutil.Process(servers.now.process.pid), *servers.now.children]
    for _ in range(100):
        for one in processes:
            one.suspend()
        path = servers.storage / "state.sqlite3"
        with closing(sqlite3.connect(path, timeout=0.2, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                pass
            else:
                connection.execute("ROLLBACK")
                return processes
        for one in processes:
            one.resume()
        time.sleep(random.random() * 0.1)
    raise AssertionError("it is always in a transaction")


@pytest.mark.slow
def test_a_server_that_was_suspended_cannot_write_any_more(model: Path, tmp_path: Path) -> None:
    first, second = Servers(model, tmp_path / "storage"), Servers(model, tmp_path / "storage")
    try:
        batch_id = first.start_batch(2000, max_tokens=8, ignore_eos=True)
        first.wait(lambda: answered(first) >= 50)
        suspended = suspend_between_transactions(first)
        second.wait(lambda: second.batch(batch_id)["request_counts"]["completed"] > 150)
        for one in suspended:
            one.resume()
        first.now.wait_for("another process has taken over the batches")
        second.check(batch_id, 2000)
    finally:
        first.now.close()
        second.now.close()


@pytest.mark.slow
def test_an_upload_that_is_killed_leaves_no_file(servers: Servers) -> None:
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'

    def body() -> Iterator[bytes]:
        yield head
        for piece in range(40):
            if piece == 30:
                servers.kill()
            yield os.urandom(100_000)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    with pytest.raises(httpx.HTTPError):
        servers.now.http.post("/v1/files", content=body(), headers=headers)
    servers.restart()
    assert servers.now.http.get("/v1/files").json()["data"] == []
    assert list((servers.storage / "files").iterdir()) == []
