"""A thread for a runner whose calls return when their work is done.

In it the runner's steps overlap with the loop's work like those of a device that works by itself:
so what the loop does with steps in flight is tested, and its cost measured, without such a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from trunkline.kernels.interface import IntArray, PendingResult
    from trunkline.plan import Plan

Bytes = npt.NDArray[np.uint8]
Jobs = SimpleQueue[Callable[[], None] | None]

THREAD_OVERLAP_DEPTH: Final = 1  # one step is computed while another is planned and committed


class Runner(Protocol):
    """What is needed of a runner."""

    def forward(self, plan: Plan) -> None: ...
    def sample(self, plan: Plan, masks: IntArray | None = None) -> PendingResult: ...


class RunnerThread:
    """Calls a runner in a thread, in the order of its own calls, which return at once.

    What a `forward` or `sample` there raises, `wait` raises here, also for the steps that were
    launched before that was known: they would be computed without the page tables that the failed
    one was to write. The thread ends when nothing refers to its `RunnerThread` any more.
    """

    overlap_depth = THREAD_OVERLAP_DEPTH

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._jobs: Jobs = SimpleQueue()
        self._step: _Step | None = None  # between `forward` and `sample`
        self._life = _Life()
        weakref.finalize(self, self._jobs.put, None)
        threading.Thread(
            target=_serve, args=(self._jobs,), name="trunkline-runner", daemon=True
        ).start()

    def forward(self, plan: Plan) -> None:
        """See `loop.Executor`."""
        if self._life.was_reported:
            self._life = _Life()
        self._step = _Step(self._runner, plan, self._life)
        self._jobs.put(self._step.forward)

    def awaits_earlier(self, plan: Plan) -> bool:
        """See `loop.Executor`: the tokens of earlier steps are there when this one is computed."""
        return False

    def sample(self, plan: Plan, masks: IntArray | None = None) -> _Step:
        """See `loop.Executor`.

        Raises:
            ValueError: `forward` was not called with this plan.
        """
        step, self._step = self._step, None
        if step is None or step.plan is not plan:
            raise ValueError(f"step {plan.step} is to be sampled before its forward pass")
        step.masks = masks
        self._jobs.put(step.sample)
        return step


class _Life:
    """Steps that depend on each other: those launched until one's failure is known."""

    __slots__ = ("error", "was_reported")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.was_reported = False


class _Step:
    """A step in the thread; a `PendingResult` outside of it."""

    __slots__ = ("_life", "_outcome", "_runner", "masks", "plan")

    def __init__(self, runner: Runner, plan: Plan, life: _Life) -> None:
        self._runner = runner
        self._life = life
        self._outcome: SimpleQueue[Bytes | BaseException] = SimpleQueue()
        self.plan = plan
        self.masks: IntArray | None = None

    def forward(self) -> None:
        if self._life.error is not None:
            return
        try:
            self._runner.forward(self.plan)
        except BaseException as error:  # a panic of the kernels, too: who waits must learn of it
            self._life.error = error

    def sample(self) -> None:
        if self._life.error is None:
            try:
                result = self._runner.sample(self.plan, self.masks).wait()
                self._outcome.put(result)
                return
            except BaseException as error:
                self._life.error = error
        self._outcome.put(self._life.error)

    def wait(self) -> Bytes:
        outcome = self._outcome.get()
        if isinstance(outcome, BaseException):
            self._life.was_reported = True
            raise outcome
        return outcome


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it would keep a runner alive until the next one
