"""A runner in a thread: order, failures, and its end."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from tests.engine.overlap.runner_thread import RunnerThread
from tests.kernels.plan_builder import build_plan

from trunkline.kernels import Finished
from trunkline.plan import Plan


class Recorder:
    """Notes its calls; `gate` holds them up, `failures` are raised by step and call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.failures: dict[tuple[str, int], BaseException] = {}

    def note(self, name: str, plan: Plan) -> None:
        assert self.gate.wait(10)
        self.threads.add(threading.current_thread().name)
        self.calls.append((name, plan.step))
        if (name, plan.step) in self.failures:
            raise self.failures[name, plan.step]

    def forward(self, plan: Plan) -> None:
        self.note("forward", plan)

    def sample(self, plan: Plan, masks: Any = None) -> Finished:
        self.note("sample", plan)
        return Finished(np.full(1, plan.step, np.uint8))


def launch(thread: RunnerThread, step: int) -> Any:
    plan = build_plan(step, {})
    thread.forward(plan)
    return thread.sample(plan)


def test_calls_return_before_their_work_is_done_and_keep_their_order() -> None:
    recorder = Recorder()
    thread = RunnerThread(recorder)
    pending = [launch(thread, step) for step in (1, 2)]
    assert recorder.calls == []
    recorder.gate.set()
    assert [one.wait().tolist() for one in pending] == [[1], [2]]
    assert recorder.calls == [("forward", 1), ("sample", 1), ("forward", 2), ("sample", 2)]
    assert recorder.threads == {"trunkline-runner"}


class Panic(BaseException):
    """As the kernels' panics are: no `Exception`."""


@pytest.mark.parametrize("name", ["forward", "sample"])
@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_failure_takes_what_was_launched_behind_it_and_nothing_after(
    name: str, kind: type[BaseException]
) -> None:
    recorder = Recorder()
    recorder.failures[name, 1] = kind("lost")
    thread = RunnerThread(recorder)
    first, second = launch(thread, 1), launch(thread, 2)
    recorder.gate.set()
    for pending in (first, second):
        with pytest.raises(kind, match="lost"):
            pending.wait()
    assert ("forward", 2) not in recorder.calls
    assert launch(thread, 3).wait().tolist() == [3]


def test_a_step_is_sampled_after_its_forward_pass() -> None:
    recorder = Recorder()
    recorder.gate.set()
    thread = RunnerThread(recorder)
    with pytest.raises(ValueError, match="step 1 is to be sampled before its forward pass"):
        thread.sample(build_plan(1, {}))
    thread.forward(build_plan(1, {}))
    with pytest.raises(ValueError, match="step 2"):
        thread.sample(build_plan(2, {}))


def test_thread_and_runner_end_with_the_last_reference() -> None:
    recorder = Recorder()
    recorder.gate.set()
    before = set(threading.enumerate())
    thread = RunnerThread(recorder)
    [worker] = set(threading.enumerate()) - before
    launch(thread, 1).wait()
    runner = weakref.ref(recorder)
    del thread, recorder
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()
    assert runner() is None
