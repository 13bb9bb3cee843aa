"""Everything that an engine inside somebody else's process has to get along with."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from tests.engine.test_engine import GREEDY, running

from trunkline import Engine
from trunkline.engine.client import EngineDied

ROOT = Path(__file__).parents[2]
CONTEXT = 32_768  # so long that no test outlasts a request that uses it up
SIZES: dict[str, Any] = {
    "max_total_tokens": CONTEXT,
    "max_prefill_tokens": 128,
    "json_model_override_args": json.dumps({"max_position_embeddings": CONTEXT}),
}
LONG = {"max_new_tokens": CONTEXT - 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    with Engine(tiny_model, **SIZES) as started:
        yield started


def wait_idle(engine: Engine, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while running(engine):
        assert time.monotonic() < deadline, "a request still runs"
        time.sleep(0.01)


def test_built_and_used_in_a_thread(tiny_model: str) -> None:
    def work() -> list[int]:
        with Engine(tiny_model, **SIZES) as engine:
            first: list[int] = engine.generate("The quick", GREEDY)["output_ids"]
            second = asyncio.run(engine.async_generate("The quick", GREEDY))["output_ids"]
            assert first == second
            return first

    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(work).result()) == 6


def test_signal_handlers_and_torch_threads_stay_as_they_were(tiny_model: str) -> None:
    def mine(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, mine)
    threads = torch.get_num_threads()
    try:
        with Engine(tiny_model, **SIZES) as engine:
            engine.generate("The quick", GREEDY)
            assert signal.getsignal(signal.SIGINT) is mine
            assert torch.get_num_threads() == threads
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_loops_and_threads_mix(engine: Engine) -> None:
    expected = engine.generate("The quick", GREEDY)["output_ids"]
    assert engine.generate("The quick", GREEDY)["output_ids"] == expected
    for _ in range(2):
        assert asyncio.run(engine.async_generate("The quick", GREEDY))["output_ids"] == expected
    assert uvloop.run(engine.async_generate("The quick", GREEDY))["output_ids"] == expected
    prompts = [f"Prompt number {i}" for i in range(16)]
    solo = [engine.generate(prompt, GREEDY)["output_ids"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda prompt: engine.generate(prompt, GREEDY), prompts))
    assert [output["output_ids"] for output in outputs] == solo


def test_a_synchronous_call_inside_a_running_loop_works(engine: Engine) -> None:
    async def main() -> None:
        output = engine.generate("The quick", GREEDY)
        assert output["output_ids"] == expected
        assert len(list(engine.generate("The quick", GREEDY, stream=True))) >= 1

    expected = engine.generate("The quick", GREEDY)["output_ids"]
    asyncio.run(main())


def test_an_application_holds_an_engine(tiny_model: str) -> None:
    """Built and shut down in an ASGI lifespan under uvloop, used by its handlers."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with Engine(tiny_model, **SIZES) as app.state.engine:
            yield

    async def answer(request: Request) -> JSONResponse:
        engine: Engine = request.app.state.engine
        stream = await engine.async_generate("The quick", GREEDY, stream=True)
        chunks = [chunk async for chunk in stream]
        whole = await engine.async_generate("The quick", GREEDY)
        return JSONResponse([chunks[-1]["output_ids"], whole["output_ids"]])

    app = Starlette(routes=[Route("/", answer)], lifespan=lifespan)
    with TestClient(app, backend_options={"use_uvloop": True}) as client:
        for _ in range(2):
            streamed, whole = client.get("/").json()
            assert streamed == whole
            assert len(whole) == 6


@pytest.mark.usefixtures("slow_runner")
def test_abandoned_streams_are_aborted(engine: Engine) -> None:
    for chunk in engine.generate("The quick", LONG, stream=True):
        if len(chunk["output_ids"]) >= 2:
            break
    wait_idle(engine)

    async def leave() -> None:
        async for chunk in await engine.async_generate("The quick", LONG, stream=True):
            if len(chunk["output_ids"]) >= 2:
                break

    asyncio.run(leave())
    wait_idle(engine)

    async def cancel() -> None:
        task = asyncio.create_task(engine.async_generate("The quick", LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wait_idle(engine)
    assert len(engine.generate("The quick", GREEDY)["output_ids"]) == 6


def test_ctrl_c_in_a_waiting_call_aborts_its_request(engine: Engine) -> None:
    def press() -> None:
        while not running(engine):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    # In the background of a shell it is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["The quick"] * 8, LONG)
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)
    wait_idle(engine)


def test_threads_descriptors_and_memory_come_back(tiny_model: str) -> None:
    process = psutil.Process()
    counts = []
    for _ in range(5):
        engine = Engine(tiny_model, **SIZES)
        engine.generate("The quick", GREEDY)
        asyncio.run(engine.async_generate("The quick", GREEDY))
        engine.shutdown()
        del engine
        gc.collect()
        threads = sorted(thread.name for thread in threading.enumerate())
        counts.append((process.num_fds(), threads, len(process.children())))
        resident = process.memory_info().rss
        if len(counts) == 2:
            warm = resident
    assert counts[1:] == [counts[1]] * 4
    assert resident < 1.05**3 * warm


def test_an_engine_that_is_forgotten_ends_by_itself(tiny_model: str) -> None:
    before = threading.active_count()
    engine = Engine(tiny_model, **SIZES)
    engine.generate("The quick", GREEDY)
    assert threading.active_count() == before + 2
    del engine
    gc.collect()
    assert threading.active_count() == before


def test_two_engines_live_side_by_side(tiny_model: str, other_model: str) -> None:
    prompts = [f"Prompt number {i}" for i in range(4)]
    solo = []
    for model in (tiny_model, other_model):
        with Engine(model, **SIZES) as engine:
            solo.append([engine.generate(prompt, GREEDY)["output_ids"] for prompt in prompts])
    with Engine(tiny_model, **SIZES) as first, Engine(other_model, **SIZES) as second:

        async def main() -> list[Any]:
            calls = [e.async_generate(p, GREEDY) for p in prompts for e in (first, second)]
            return await asyncio.gather(*calls)

        outputs = [output["output_ids"] for output in asyncio.run(main())]
    assert [outputs[0::2], outputs[1::2]] == solo


SCRIPT = """
from trunkline import Engine
from trunkline.engine.client import EngineDied
engine = Engine({model!r}, max_total_tokens=1024, max_prefill_tokens=64)
print(len(engine.generate("The quick", {{"max_new_tokens": 5, "ignore_eos": True}})["output_ids"]))
"""


def scripts(model: str, directory: Path) -> dict[str, tuple[list[str], str | None]]:
    """Ways to run the same lines, without a guard and without a shutdown."""
    text = SCRIPT.format(model=model)
    (directory / "x.py").write_text(text)
    return {"file": (["x.py"], None), "stdin": (["-"], text)}


def test_scripts_need_no_guard(tiny_model: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    started = [
        (
            name,
            text,
            subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env=environment,
            ),
        )
        for name, (arguments, text) in scripts(tiny_model, tmp_path).items()
    ]
    for name, text, process in started:
        output, errors = process.communicate(text, timeout=120)
        assert (name, output, process.returncode) == (name, "5\n", 0), errors


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_that_the_engine_stayed_behind(engine: Engine) -> None:
    engine.generate("The quick", GREEDY)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # instead of waiting for threads that are not there
        errors = []
        for call in (
            lambda: engine.generate("The quick", GREEDY),
            lambda: asyncio.run(engine.async_generate("The quick", GREEDY)),
            lambda: list(engine.generate("The quick", GREEDY, stream=True)),
        ):
            try:
                call()
            except EngineDied as error:
                errors.append(str(error))
        engine.shutdown()
        os.write(write_end, "\n".join(errors).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        errors = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(errors) == 3
    assert all(f"lives in process {os.getpid()}" in error for error in errors)
    assert len(engine.generate("The quick", GREEDY)["output_ids"]) == 6
