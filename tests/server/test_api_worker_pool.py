"""API workers as the first process keeps them, at an engine that only has a status."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from tests.checkpoints import TinyCheckpoint
from tests.server.fake_engine import FACTS

from trunkline.engine.channel import Changed
from trunkline.engine.client import Client
from trunkline.engine.config import EngineConfig, ModelOptions
from trunkline.engine.messages import EngineStatus
from trunkline.server.api_workers.pool import ApiWorkers, WorkerFailed
from trunkline.server.config import ServerConfig
from trunkline.server.metrics import Metrics

TITLE = "engine-serve: API worker"


class Engine:
    """What the pool needs of an `EngineProcess`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._status = EngineStatus(state="starting", epoch=1)
        self._changed: Changed = lambda: None

    def watch(self, changed: Changed) -> None:
        self._changed = changed

    def status(self) -> EngineStatus:
        return self._status

    def open_to_all(self, epoch: int) -> None:
        assert epoch == self._status.epoch
        self._status = msgspec.structs.replace(self._status, access="shared")
        self._changed()

    def be(self, state: str) -> None:
        self._status = msgspec.structs.replace(
            self._status, state=state, facts=FACTS, access="suspects"
        )
        self._changed()


class Pool:
    """One worker, at a port."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        model = ModelOptions(model_path=str(TinyCheckpoint().write(directory / "model")))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.port = listener.getsockname()[1]
        self.engine = Engine(directory)
        config = ServerConfig(engine=EngineConfig(model=model))
        client = Client(self.engine)  # type: ignore[arg-type]
        self.workers = ApiWorkers(config, [self.engine], client, [listener])  # type: ignore[list-item]

    def process(self) -> psutil.Process | None:
        for child in psutil.Process().children():
            if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[:1] == [TITLE]:
                return child
        return None

    async def answer(self) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as http:
            return await http.get(f"http://127.0.0.1:{self.port}/v1/models")

    async def running(self) -> psutil.Process:
        deadline = time.monotonic() + 30
        while (process := self.process()) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return process

    async def serving(self) -> psutil.Process:
        self.workers.start()
        self.engine.be("ready")
        await asyncio.wait_for(self.workers.loaded(), 30)
        self.workers.serve(Metrics("m"))
        return await self.running()


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Pool], Awaitable[None]]], None]:
    def play(scene: Callable[[Pool], Awaitable[None]]) -> None:
        async def main() -> None:
            pool = Pool(tmp_path)
            try:
                await scene(pool)
            finally:
                pool.workers.kill()
                await pool.workers.close()
                pool.workers.relay.close()
            assert pool.process() is None

        asyncio.run(main())

    return play


def test_a_worker_that_waits_for_the_engine_leaves_by_itself(play) -> None:
    async def scene(pool: Pool) -> None:
        pool.workers.start()
        assert (await pool.answer()).status_code == 503, "it listens while the engine loads"
        process = await pool.running()
        await pool.workers.close()
        assert not process.is_running()
        (child,) = pool.workers._children.values()
        assert child.process.returncode == 0, "it was not killed"

    play(scene)


def test_connections_wait_for_the_successor_of_a_worker(play) -> None:
    async def scene(pool: Pool) -> None:
        process = await pool.serving()
        assert (await pool.answer()).status_code == 200
        process.kill()
        process.wait(10)
        answers = await asyncio.gather(*(pool.answer() for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}

    play(scene)


def test_none_outlives_the_end_and_connections_are_refused(play) -> None:
    async def scene(pool: Pool) -> None:
        process = await pool.serving()
        process.kill()
        # The successor is being started, or soon will be.
        await asyncio.sleep(0.03)
        await pool.workers.close()
        assert pool.process() is None
        with pytest.raises(httpx.ConnectError):
            await pool.answer()

    play(scene)


def test_what_keeps_a_worker_from_starting_is_told(play, monkeypatch) -> None:
    def popen(*arguments: object, **options: object) -> None:
        raise OSError("no more processes")

    async def scene(pool: Pool) -> None:
        monkeypatch.setattr("trunkline.server.api_workers.pool.subprocess.Popen", popen)
        pool.workers.start()
        with pytest.raises(WorkerFailed, match="could not be started"):
            await asyncio.wait_for(pool.workers.loaded(), 10)

    play(scene)


def test_a_worker_whose_answers_cannot_be_read_is_replaced(play, monkeypatch) -> None:
    decode = msgspec.json.decode
    broken: list[bytes] = []

    def decode_all_but_one(text: bytes, **options: object) -> object:
        if not broken:
            broken.append(text)
            raise msgspec.DecodeError("truncated")
        return decode(text, **options)

    async def scene(pool: Pool) -> None:
        process = await pool.serving()
        monkeypatch.setattr(msgspec.json, "decode", decode_all_but_one)
        assert (await pool.answer()).status_code == 200  # it tells of what it has counted
        while not broken:
            await asyncio.sleep(0.02)
        successor = await pool.running()
        while successor.pid == process.pid:
            await asyncio.sleep(0.02)
            successor = await pool.running()
        assert (await pool.answer()).status_code == 200

    play(scene)
