"""Where grammars are compiled: in a child process, or in a thread of this one.

Both take jobs and give outcomes without ever waiting, for the engine's loop to poll, and load what
was compiled in a thread of theirs. Neither knows requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from trunkline.engine.grammar.backend import Backend, Compiled
from trunkline.engine.grammar.compiler_child import (
    NICENESS,
    Job,
    Outcome,
    Setup,
    compile_job,
    out_of_time,
)
from trunkline.engine.grammar.frames import FrameReader, frame
from trunkline.engine.messages import GrammarSpec

logger = logging.getLogger(__name__)

START_LIMIT_S: Final = 120.0
MAX_EARLY_DEATHS: Final = 3  # in a row, before the child was ready
_DOES_NOT_START: Final = "the grammar compiler does not start any more."


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a job: a grammar, or the reason why there is none.

    `is_fault`: the reason lies with the compiler, not with the grammar.
    """

    key: int
    seconds: float
    compiled: Compiled | None = None
    error: str | None = None
    is_fault: bool = False


class Compiler(Protocol):
    """Compiles grammars elsewhere; to be called from one thread."""

    def submit(self, key: int, spec: GrammarSpec) -> None:
        """Start a job; its outcome comes under `key`, which is above 0 and never used twice."""

    def cancel(self, key: int) -> None:
        """Nobody wants that job any more; it may still have an outcome."""

    def finished(self) -> list[Finished]:
        """Outcomes since the last call."""

    def close(self) -> None:
        """End it; jobs have no outcomes any more. Idempotent."""


class _Inbox:
    """Outcomes between two threads, loaded where they arrive."""

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self._ready: deque[Finished] = deque()
        self.wake: Callable[[], None] = _nobody

    def put(self, outcome: Outcome) -> None:
        finished = Finished(outcome.key, outcome.seconds, error=outcome.error)
        if outcome.error is None:
            try:
                assert self.backend is not None, "`use` comes before the first job"
                compiled = self.backend.load(outcome.data)
                finished = Finished(outcome.key, outcome.seconds, compiled)
            except Exception as error:  # one request fails, and the reason is told
                logger.exception("A compiled grammar cannot be loaded")
                words = f"internal error: {error}"
                finished = Finished(outcome.key, outcome.seconds, error=words, is_fault=True)
        self._ready.append(finished)
        self.wake()

    def put_fault(self, key: int, error: str) -> None:
        """The compiler has failed at a job."""
        self._ready.append(Finished(key, 0.0, error=error, is_fault=True))
        self.wake()

    def take(self) -> list[Finished]:
        taken = []
        while self._ready:
            taken.append(self._ready.popleft())
        return taken


class CompilerProcess:
    """`Compiler` in a child process, which is started again when it dies."""

    def __init__(
        self, setup: Setup, module: str = "trunkline.engine.grammar.compiler_child"
    ) -> None:
        """Start the child, which runs `module`; see `use` and `wait_ready`."""
        self._module = module
        self._setup = frame(msgspec.msgpack.encode(setup))
        self._inbox = _Inbox()
        self._jobs: dict[int, bytes] = {}  # in flight; guarded by the lock, as is the child
        self._suspects: set[int] = set()  # were in flight when a child died
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._closing = False
        self._outgoing: queue.SimpleQueue[tuple[subprocess.Popen[bytes], bytes] | None]
        self._outgoing = queue.SimpleQueue()
        self._child = self._spawn()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._read, "grammar-reader"), (self._write, "grammar-writer"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def use(self, backend: Backend) -> None:
        """Load what was compiled with this backend; to be called before the first job."""
        self._inbox.backend = backend

    def wait_ready(self) -> None:
        """Return once the child has imported the backend.

        Raises:
            ValueError: it cannot start; its own words are on standard error.
        """
        if not self._ready.wait(START_LIMIT_S) or self._closing:
            self.close()
            raise ValueError(
                "the grammar compiler does not start; --grammar-backend none does without it"
            )

    def call_on_outcome(self, wake: Callable[[], None]) -> None:
        """`wake` is called, in some thread, when `finished` has something new."""
        self._inbox.wake = wake

    def submit(self, key: int, spec: GrammarSpec) -> None:
        data = frame(msgspec.msgpack.encode(Job(key, spec)))
        with self._lock:
            if not self._closing:
                self._jobs[key] = data
                self._outgoing.put((self._child, data))
                return
        self._inbox.put_fault(key, _DOES_NOT_START)

    def cancel(self, key: int) -> None:
        with self._lock:
            if self._jobs.pop(key, None) is not None:
                data = frame(msgspec.msgpack.encode(Job(key, None)))
                self._outgoing.put((self._child, data))

    def finished(self) -> list[Finished]:
        return self._inbox.take()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            child = self._child
        self._outgoing.put(None)
        child.kill()
        child.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _spawn(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._outgoing.put((child, self._setup))
        return child

    def _write(self) -> None:
        while (item := self._outgoing.get()) is not None:
            child, data = item
            assert child.stdin is not None
            # It has died, and its pipe may be closed already: the reader sees to that.
            with contextlib.suppress(OSError, ValueError):
                child.stdin.write(data)
                child.stdin.flush()

    def _read(self) -> None:
        early_deaths = 0
        while True:
            if self._serve():
                early_deaths = 0
            else:
                early_deaths += 1
            if self._closing:
                return
            if early_deaths >= MAX_EARLY_DEATHS:
                logger.error("The grammar compiler does not start any more")
                self._give_up()
                return
            self._start_again()
            logger.warning("The grammar compiler has died and was started again")

    def _start_again(self) -> None:
        """Give a new child the jobs of the old one; each gets no more than two."""
        with self._lock:
            if self._closing:
                return
            lost = [key for key in self._jobs if key in self._suspects]
            for key in lost:
                del self._jobs[key]
            self._suspects = set(self._jobs)
            self._child = self._spawn()
            for data in self._jobs.values():
                self._outgoing.put((self._child, data))
        for key in lost:
            self._inbox.put_fault(key, "the compiler died twice while it was compiled.")

    def _give_up(self) -> None:
        with self._lock:
            self._closing = True
            lost, self._jobs = list(self._jobs), {}
        self._ready.set()
        for key in lost:
            self._inbox.put_fault(key, _DOES_NOT_START)

    def _serve(self) -> bool:
        """Take outcomes until the child's end; whether it was ready before."""
        child, reader, was_ready = self._child, FrameReader(), False
        assert child.stdout is not None
        descriptor = child.stdout.fileno()
        while reader.read(descriptor):
            while (data := reader.take()) is not None:
                outcome = msgspec.msgpack.decode(data, type=Outcome)
                if outcome.key == 0:
                    was_ready = True
                    self._ready.set()
                    continue
                with self._lock:
                    wanted = self._jobs.pop(outcome.key, None) is not None
                if wanted:
                    self._inbox.put(outcome)
        child.wait()
        for pipe in (child.stdout, child.stdin):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return was_ready


class CompilerThread:
    """`Compiler` in a thread of this process: for engines that must not start processes.

    A job past its time limit, by the clock, has an outcome, but runs on, and later jobs wait for
    it. What crashes takes the process with it.
    """

    def __init__(self, setup: Setup) -> None:
        self._time_limit_s = setup.time_limit_s
        self._max_bytes = setup.max_compiled_bytes
        self._inbox = _Inbox()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._running: tuple[int, float] | None = None  # job, deadline
        self._late: set[int] = set()
        self._thread: threading.Thread | None = None

    def use(self, backend: Backend) -> None:
        """See `CompilerProcess.use`."""
        self._inbox.backend = backend

    def wait_ready(self) -> None:
        """See `CompilerProcess.wait_ready`; it is ready."""

    def call_on_outcome(self, wake: Callable[[], None]) -> None:
        """See `CompilerProcess.call_on_outcome`."""
        self._inbox.wake = wake

    def submit(self, key: int, spec: GrammarSpec) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            self._thread.start()
        self._queue.put(Job(key, spec))

    def cancel(self, key: int) -> None:
        self._cancelled.add(key)

    def finished(self) -> list[Finished]:
        running = self._running
        taken = []
        for one in self._inbox.take():
            self._cancelled.discard(one.key)
            if one.key in self._late:
                self._late.discard(one.key)
            else:
                taken.append(one)
        if running is not None and running[0] not in self._late and time.monotonic() > running[1]:
            self._late.add(running[0])
            words = out_of_time(self._time_limit_s)
            taken.append(Finished(running[0], self._time_limit_s, error=words))
        return taken

    def close(self) -> None:
        self._queue.put(None)  # the thread is a daemon: what it compiles is not waited for

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._queue.get()) is not None:
            if job.key in self._cancelled:
                self._cancelled.discard(job.key)
                continue
            self._running = (job.key, time.monotonic() + self._time_limit_s)
            assert self._inbox.backend is not None, "`use` comes before the first job"
            outcome = compile_job(self._inbox.backend, job, self._max_bytes)
            self._running = None
            self._inbox.put(outcome)


def _nobody() -> None:
    """Stands in until a loop wants to be woken."""
