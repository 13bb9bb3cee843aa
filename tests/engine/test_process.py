"""The supervised engine process: start, death, restart, orphans; with a fake scheduler inside."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.engine.test_client import request

from trunkline import Engine
from trunkline.engine.client import Client, EngineDied, Stream
from trunkline.engine.config import EngineConfig, ModelOptions, SchedulerOptions
from trunkline.engine.launch import engine_config
from trunkline.engine.process import EngineProcess
from trunkline.engine.recovery import MAX_DEATHS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def engine_process(model: str, watchdog_timeout: float = 300.0) -> EngineProcess:
    config = EngineConfig(
        model=ModelOptions(model_path=model),
        scheduler=SchedulerOptions(watchdog_timeout=watchdog_timeout),
    )
    return EngineProcess(config, module="tests.engine.fake_child")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_requests_and_controls_cross_the_process_boundary(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def main() -> None:
        process = engine_process("good")
        client = Client(process)
        await client.start()
        assert client.status.state == "starting"
        with pytest.raises(EngineDied, match="starting"):
            await client.submit(request()).accepted()
        await client.ready()
        status = client.status
        assert status.facts is not None
        assert (status.epoch, status.facts.pid) == (1, process.pid)
        assert status.heartbeat_age_s is not None
        streams = [client.submit(request(prompt=[100 * i], tokens=50)) for i in range(1, 20)]
        await asyncio.gather(*(stream.finished() for stream in streams))
        for i, stream in enumerate(streams, 1):
            assert stream.samples[0].output_ids == list(range(100 * i + 1, 100 * i + 51))
        assert (await client.control("stats"))["num_running"] == 0
        pid, directory = process.pid, process.directory
        assert pid is not None
        assert directory is not None
        assert directory.exists()
        await client.close()
        assert not alive(pid)
        assert not directory.exists()
        assert client.status.state == "dead"

    run(main())


def test_requests_outlive_their_engine() -> None:
    async def main() -> None:
        process = engine_process("slow")
        client = Client(process)
        await client.start()
        await client.ready()
        streams = [client.submit(request(rid=f"r{i}", prompt=[100 * i], tokens=60)) for i in (1, 2)]
        rest = [asyncio.create_task(collected(stream)) for stream in streams]
        for epoch in (2, 3):
            while min(len(stream.samples[0].output_ids) for stream in streams) < 15 * (epoch - 1):
                await asyncio.sleep(0.005)
            pid = process.pid
            assert pid is not None
            keys = {stream.key for stream in streams}
            os.kill(pid, signal.SIGKILL)
            entered = process.entered(epoch - 1)
            assert entered is not None
            assert keys <= entered.keys, "it tells after its death what it ran"
            assert not entered.others
            asked = asyncio.create_task(client.control("stats"))
            with pytest.raises(EngineDied):
                await asked
            while client.status.epoch < epoch or client.status.state != "ready":
                await asyncio.sleep(0.02)
        for i, stream, task in zip((1, 2), streams, rest, strict=True):
            expected = list(range(100 * i + 1, 100 * i + 61))
            text = "".join(f"<{token}>" for token in expected)
            assert await task == (expected, text)
            assert stream.samples[0].output_ids == expected
            assert stream.samples[0].finished is not None
            assert stream.samples[0].finished.reason == "length"
        await client.close()

    asyncio.run(main())


async def collected(stream: Stream) -> tuple[list[int], str]:
    """All token ids and all text of a stream's updates."""
    updates = [update async for batch in stream for update in batch]
    assert [update.finished for update in updates] == [False] * (len(updates) - 1) + [True]
    return [t for u in updates for t in u.token_ids], "".join(u.text for u in updates)


def test_a_deadly_request_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.engine.process.BACKOFF_S", (0.0,))

    async def main() -> None:
        client = Client(engine_process("deadly"))
        await client.start()
        await client.ready()
        prompts = [[100], [666], [200], [660], [700]]
        streams = [
            client.submit(request(rid=f"r{i}", prompt=prompt, tokens=400))
            for i, prompt in enumerate(prompts)
        ]
        for index, stream in enumerate(streams):
            if index in (1, 3):
                with pytest.raises(EngineDied, match="each time"):
                    await stream.finished()
            else:
                await stream.finished()
                start = prompts[index][0]
                assert stream.samples[0].output_ids == list(range(start + 1, start + 401))
        assert streams[1].samples[0].output_ids == []
        assert streams[3].samples[0].output_ids == [661, 662, 663, 664, 665, 666]
        await client.ready()
        await client.submit(request()).finished()
        await client.close()

    asyncio.run(main())


def test_what_is_aborted_while_no_engine_runs_ends_at_once() -> None:
    async def main() -> None:
        process = engine_process("slow")
        client = Client(process)
        await client.start()
        await client.ready()
        streams = [client.submit(request(rid=f"r{i}", tokens=10**6)) for i in range(3)]
        for stream in streams:
            await anext(aiter(stream))
        pid = process.pid
        assert pid is not None
        streams[0].abort()
        os.kill(pid, signal.SIGKILL)
        while client.status.state == "ready":
            await asyncio.sleep(0.001)
        streams[1].abort()
        client.abort("r2")
        for stream in streams:
            await stream.finished()
            assert stream.samples[0].finished is not None
            assert stream.samples[0].finished.reason == "abort"
        await client.ready()
        assert (await client.control("stats"))["num_running"] == 0
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("model", "cause", "shows_stack"),
    [("bad", "tensor lm_head is missing", False), ("broken", "KeyError: 'lm_head'", True)],
)
def test_a_failed_start_is_final_and_says_why(
    model: str, cause: str, shows_stack: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        process = engine_process(model)
        client = Client(process)
        await client.start()
        with pytest.raises(EngineDied, match=f"The engine could not start: {cause}"):
            await client.ready()
        status = client.status
        assert (status.state, status.epoch) == ("dead", 1)
        assert process.exit_code == 1
        await client.close()

    asyncio.run(main())
    assert ("Traceback" in capfd.readouterr().err) == shows_stack


def test_a_stuck_engine_is_killed_by_the_watchdog() -> None:
    async def main() -> None:
        process = engine_process("stuck", watchdog_timeout=2.0)
        client = Client(process)
        await client.start()
        await client.ready()
        stream = client.submit(request())
        await stream.accepted()
        with pytest.raises(EngineDied, match=r"loop had not moved for . s and was killed"):
            await stream.finished()
        await client.ready()
        assert client.status.epoch == 1 + MAX_DEATHS + 1
        await client.close()

    asyncio.run(main())


def test_sigterm_and_sigint_leave_the_child_to_its_supervisor() -> None:
    async def main() -> None:
        process = engine_process("slow")
        client = Client(process)
        await client.start()
        await client.ready()
        stream = client.submit(request(tokens=30))
        await stream.accepted()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        await stream.finished()
        assert client.status.epoch == 1
        await client.close()

    asyncio.run(main())


def test_a_real_model_in_a_child_gives_the_tokens_of_an_embedded_engine(tiny_model: str) -> None:
    settings = {"max_total_tokens": 1024, "max_prefill_tokens": 64}
    config = engine_config({"model_path": tiny_model, **settings})
    prompt = list(range(10, 40))

    async def main() -> list[int]:
        client = Client(EngineProcess(config))
        await client.start()
        await client.ready()
        assert client.status.facts is not None
        assert client.status.facts.max_total_tokens == 1024
        stream = client.submit(request(prompt=prompt, tokens=12))
        await stream.finished()
        assert await client.control("flush_cache") == {"flushed": True}
        await client.close()
        return stream.samples[0].output_ids

    with Engine(tiny_model, **settings) as engine:
        sampling = {"max_new_tokens": 12, "sampling_seed": 0}
        output = engine.generate(input_ids=prompt, sampling_params=sampling)
    assert asyncio.run(main()) == output["output_ids"]


def test_a_model_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        process = EngineProcess(engine_config({"model_path": str(tmp_path / "nothing")}))
        client = Client(process)
        await client.start()
        with pytest.raises(EngineDied, match="nothing"):
            await client.ready()
        assert process.exit_code == 1
        await client.close()

    asyncio.run(main())


PARENT = """
import asyncio
from tests.engine.test_process import engine_process
from trunkline.engine.client import Client

async def main():
    process = engine_process("slow")
    client = Client(process)
    await client.start()
    await client.ready()
    print(process.pid, process.directory, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_parent_leaves_no_orphan() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    assert alive(int(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(gone(int(pid)))
    assert not Path(directory).exists()
