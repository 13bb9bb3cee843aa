"""Compiling in a child and in a thread: what goes wrong costs one job."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.engine.fake_compiler_child import ObedientBackend

from trunkline.engine.grammar.backend import Vocabulary
from trunkline.engine.grammar.compiler_child import NICENESS, Setup
from trunkline.engine.grammar.compilers import Compiler, CompilerProcess, CompilerThread, Finished
from trunkline.engine.messages import GrammarSpec

VOCABULARY = Vocabulary(tokens=["a"], special_ids={}, end_ids=[0], tokenizer_json="")


@dataclass(frozen=True)
class Loaded:
    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)


class LoadingBackend(ObedientBackend):
    def load(self, data: bytes) -> Loaded:
        return Loaded(data)


def process(time_limit_s: float = 30.0) -> CompilerProcess:
    setup = Setup(vocabulary=VOCABULARY, time_limit_s=time_limit_s, max_compiled_bytes=1000)
    compiler = CompilerProcess(setup, "tests.engine.fake_compiler_child")
    compiler.use(LoadingBackend(VOCABULARY))
    compiler.wait_ready()
    return compiler


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, str(Path(root) / "src"), known]))


@pytest.fixture
def child() -> Iterator[CompilerProcess]:
    compiler = process()
    yield compiler
    compiler.close()


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def outcomes(compiler: Compiler, count: int) -> dict[int, Finished]:
    found: dict[int, Finished] = {}
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found |= {one.key: one for one in compiler.finished()}
        time.sleep(0.005)
    return found


def running(path: Path) -> int:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return int(path.read_text())


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)


def test_jobs_that_fail_leave_the_others_and_the_child_alone(child: CompilerProcess):
    woken = threading.Event()
    child.call_on_outcome(woken.set)
    pid = child.pid
    texts = ["fine", "crash", "bad", "memory", "big 2000", "also fine"]
    for key, text in enumerate(texts, 1):
        child.submit(key, spec(text))
    found = outcomes(child, len(texts))
    errors = {texts[key - 1]: one.error or "" for key, one in found.items()}
    assert errors["fine"] == errors["also fine"] == ""
    assert found[1].compiled == Loaded(b"fine")
    assert "SIGSEGV" in errors["crash"]
    assert errors["bad"] == "it is bad."
    assert "memory" in errors["memory"]
    assert "the limit is 1000" in errors["big 2000"]
    assert woken.is_set()
    assert child.pid == pid


@pytest.mark.parametrize(("text", "limit_s"), [("sleep 3600", 0.4), ("spin", 3.0)])
def test_a_job_that_hangs_is_ended_and_others_pass_it(text: str, limit_s: float):
    compiler = process(time_limit_s=limit_s)
    try:
        compiler.submit(1, spec(text))
        compiler.submit(2, spec("fine"))
        first = outcomes(compiler, 1)
        assert list(first) == [2], "it does not wait for the one that hangs"
        assert f"longer than the limit of {limit_s:g} s" in (outcomes(compiler, 1)[1].error or "")
    finally:
        compiler.close()


def test_only_cpu_time_is_limited():
    compiler = process(time_limit_s=0.5)
    try:
        compiler.submit(1, spec("sleep 2"))
        assert outcomes(compiler, 1)[1].error is None
    finally:
        compiler.close()


def test_a_cancelled_job_is_killed(child: CompilerProcess, tmp_path: Path):
    child.submit(1, spec(f"pid {tmp_path / 'pid'}"))
    pid = running(tmp_path / "pid")
    child.cancel(1)
    assert gone(pid)
    child.submit(2, spec("fine"))
    assert list(outcomes(child, 1)) == [2]


def test_a_killed_child_is_started_again_with_its_jobs(child: CompilerProcess, tmp_path: Path):
    child.submit(1, spec("sleep 0.5"))
    child.submit(2, spec(f"pid {tmp_path / 'pid'}"))
    fork, pid = running(tmp_path / "pid"), child.pid
    child.submit(3, spec("fine"))
    os.kill(pid, signal.SIGKILL)
    assert gone(fork), "forks end with the child"
    found = outcomes(child, 2)
    assert {key: one.error for key, one in found.items()} == {1: None, 3: None}
    assert child.pid != pid
    (tmp_path / "pid").unlink(missing_ok=True)


def test_a_job_that_two_children_died_of_is_given_up(child: CompilerProcess, tmp_path: Path):
    child.submit(1, spec(f"pid {tmp_path / 'pid'}"))
    for _ in range(2):
        running(tmp_path / "pid")
        (tmp_path / "pid").unlink()
        os.kill(child.pid, signal.SIGKILL)
    lost = outcomes(child, 1)[1]
    assert "died twice" in (lost.error or "")
    assert lost.is_fault, "it may be no fault of the grammar's"
    child.submit(2, spec("fine"))
    assert outcomes(child, 1)[2].error is None


def test_child_and_forks_end_with_their_parent_and_are_niced(
    child: CompilerProcess, tmp_path: Path
):
    child.submit(1, spec(f"pid {tmp_path / 'pid'}"))
    fork = psutil.Process(running(tmp_path / "pid"))
    once = psutil.Process().nice() + NICENESS  # twice would starve it beside a busy engine
    assert fork.nice() == min(once, 19)
    child.close()
    assert gone(fork.pid)
    assert gone(child.pid)


def test_the_thread_does_the_same_but_crash():
    setup = Setup(vocabulary=VOCABULARY, time_limit_s=1.0, max_compiled_bytes=1000)
    compiler = CompilerThread(setup)
    compiler.use(LoadingBackend(VOCABULARY))
    for key, text in enumerate(["fine", "bad", "big 2000", "sleep 2", "cancelled", "fine"], 1):
        compiler.submit(key, spec(text))
    compiler.cancel(5)
    found = outcomes(compiler, 5)
    compiler.close()
    assert sorted(found) == [1, 2, 3, 4, 6]
    assert found[6].error is None
    assert "longer than" in (found[4].error or "")
    assert not compiler._late | compiler._cancelled, "nothing is kept of jobs that are done"
