"""Several HTTP processes on one port: what each can do, and what happens when one dies."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.checkpoints import TinyCheckpoint
from tests.engine.test_client import request
from tests.engine.test_process import engine_process
from tests.server.process import KEY, READY, ROOT, Process

from trunkline.engine.attached import AttachedEngine
from trunkline.engine.client import Client, DeadlyRequest
from trunkline.server.api_workers.orders import Told
from trunkline.server.api_workers.turns import Turns

TITLE = "engine-serve: API worker"
LONG = {"text": "the", "sampling_params": {"max_new_tokens": 150, "ignore_eos": True, "seed": 1}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    config = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16}
    model = TinyCheckpoint(config=config).write(tmp_path / "model")
    flags = ["--api-workers", "3", "--file-storage-path", str(tmp_path / "files")]
    process = Process(model, "--api-key", KEY, *flags)
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()


def workers(server: Process) -> list[psutil.Process]:
    return [one for one in server.children if one.cmdline()[0] == TITLE]


def ask(server: Process, method: str, path: str, **body: object) -> httpx.Response:
    """A request on a connection of its own: any of the processes may get it."""
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.request(
        method, f"http://127.0.0.1:{server.port}{path}", headers=headers, timeout=30, **body
    )  # type: ignore[arg-type]


def finished(server: Process) -> float:
    lines = ask(server, "GET", "/metrics").text.splitlines()
    counts = [line.split() for line in lines if line.startswith("engine_num_requests_total{")]
    return sum(float(value) for _, value in counts)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


class Streams:
    """Streams on connections of their own; `texts` has those that came to their end."""

    def __init__(self, server: Process, count: int) -> None:
        self.texts: list[str] = []
        self.broken = 0
        self.begun = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._read, args=(server, number)) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()
        for _ in range(count):
            assert self.begun.acquire(timeout=30)

    def _read(self, server: Process, number: int) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{server.port}/generate"
        text, body = "", {**LONG, "stream": True, "rid": f"stream-{number}"}
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
                for index, line in enumerate(response.iter_lines()):
                    if index == 0:
                        self.begun.release()
                    text += line + "\n"
        except httpx.TransportError:
            self.broken += 1
        else:
            self.texts.append(text)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)


def test_all_processes_do_everything_and_one_may_die(server: Process) -> None:
    assert len(workers(server)) == 2
    before = finished(server)
    kept = []
    for _ in range(8):
        answer = ask(server, "POST", "/v1/responses", json={"input": "hi", "max_output_tokens": 2})
        kept.append(answer.json()["id"])
        assert ask(server, "GET", f"/v1/responses/{kept[-1]}").json()["id"] == kept[-1]
        file = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        new = ask(server, "POST", "/v1/files", **file).json()["id"]
        assert ask(server, "GET", f"/v1/files/{new}/content").content == b"{}\n"
        assert ask(server, "GET", "/v1/models").status_code == 200
        wrong = httpx.get(f"http://127.0.0.1:{server.port}/v1/files")
        assert (wrong.status_code, "invalid_api_key" in wrong.text) == (401, True)
    streams = Streams(server, 24)
    workers(server)[0].kill()
    streams.join()
    time.sleep(0.7)  # longer than it takes the living to tell what they have counted
    assert 0 < streams.broken < 24, "each process had some"
    assert len(streams.texts) == 24 - streams.broken
    assert all(text.endswith("data: [DONE]\n\n") for text in streams.texts)
    server.wait_for("was killed by SIGKILL; starting it again")
    until(lambda: len(workers(server)) == 2)
    # Of what a killed process has counted, the last half second is lost, and no more.
    counted = finished(server)
    assert before + 8 <= counted <= before + 8 + len(streams.texts)
    for _ in range(16):
        short = {"text": "the", "sampling_params": {"max_new_tokens": 2}}
        assert ask(server, "POST", "/generate", json=short).status_code == 200
    until(lambda: finished(server) == counted + 16)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_streams_of_all_processes_outlive_the_engine_and_end_on_command(server: Process) -> None:
    undisturbed = Streams(server, 12)
    undisturbed.join()
    streams = Streams(server, 12)
    (engine,) = [one for one in server.children if one.cmdline()[0] != TITLE]
    engine.kill()
    streams.join()
    assert (streams.broken, len(streams.texts)) == (0, 12)
    assert all('"finish_reason":{"type":"length"' in text for text in streams.texts)
    streams = Streams(server, 12)
    assert ask(server, "POST", "/abort_request", json={"abort_all": True}).status_code == 200
    streams.join()
    assert all('"type":"abort"' in text for text in streams.texts), streams.texts[0][-300:]
    # The streams that are there when the server is to end have their time.
    streams = Streams(server, 12)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    streams.join()
    assert (streams.broken, len(streams.texts)) == (0, 12)


class Member:
    """An API worker without a process."""

    is_alive = True
    heard_at = 0.0

    def __init__(self, directory: Path, number: int) -> None:
        self.settled = {0: 0}
        self.channel = AttachedEngine(directory, number)
        self.client = Client(self.channel)
        self._task: asyncio.Task[None] | None = None

    def send(self, order: Told) -> None:
        self.channel.tell(order.status)
        if order.status.access == "suspects":
            self._task = asyncio.create_task(self._settle(order.status.epoch))

    async def _settle(self, epoch: int) -> None:
        while self.client.is_testing and self.channel.status().epoch == epoch:
            await asyncio.sleep(0.001)
        self.settled[0] = epoch


def test_a_deadly_request_takes_none_of_another_process_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("trunkline.engine.process.BACKOFF_S", (0.0,))

    async def main() -> None:
        engine = engine_process("deadly")
        first = Client(engine)
        await first.start()
        assert engine.directory is not None
        members = [Member(engine.directory, number) for number in (2, 3)]
        for member in members:
            await member.client.start()
        turns, tasks = Turns([engine], first, lambda: members), []

        def changed() -> None:
            if engine.status().access == "suspects":
                tasks.append(asyncio.create_task(turns.take(0)))
            else:
                for member in members:
                    member.send(Told(rank=0, status=engine.status()))

        engine.watch(changed)
        clients = [first, *(member.client for member in members)]
        for client in clients:
            await client.ready()
        harmless = [
            client.submit(request(rid=f"h{n}", prompt=[100 * n], tokens=50))
            for n, client in enumerate(clients, 1)
        ]
        deadly = [
            client.submit(request(rid=f"d{n}", prompt=[666], tokens=50))
            for n, client in enumerate(clients)
        ]
        for stream in deadly:
            with pytest.raises(DeadlyRequest):
                await asyncio.wait_for(stream.finished(), 60)
        for number, stream in enumerate(harmless, 1):
            await asyncio.wait_for(stream.finished(), 60)
            expected = list(range(100 * number + 1, 100 * number + 51))
            assert stream.samples[0].output_ids == expected
        for client in reversed(clients):
            await client.close()
        await asyncio.gather(*tasks)

    asyncio.run(main())
