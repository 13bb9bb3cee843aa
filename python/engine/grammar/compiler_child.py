"""The process that compiles grammars: `python -m trunkline.engine.grammar.compiler_child`.

It imports the backend once and never compiles itself: each job gets a fork, which may run out of
CPU time or memory, crash, or be killed because nobody wants its grammar any more, and costs that
job alone. Standard input brings `Setup`, then jobs; standard output takes outcomes. The process
ends when standard input closes, and its forks with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from trunkline.engine.grammar.backend import Backend, GrammarError, Vocabulary
from trunkline.engine.grammar.frames import FrameReader, frame
from trunkline.engine.messages import GrammarSpec

logger = logging.getLogger(__name__)

MAX_FORKS: Final = 2  # so that a short job does not wait for a long one
MEMORY_BYTES: Final = 2 << 30  # that a fork may take on top of what it has
CLOCK_PER_CPU_TIME: Final = 10  # how many times its limit of CPU time a fork may be there
NICENESS: Final = 10
_PR_SET_PDEATHSIG: Final = 1


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame to the child."""

    vocabulary: Vocabulary
    time_limit_s: float  # of a core
    max_compiled_bytes: int


class Job(msgspec.Struct, frozen=True):
    """Compile this; or, without a spec, forget the job."""

    key: int
    spec: GrammarSpec | None


class Outcome(msgspec.Struct, frozen=True):
    """A frame from the child: what became of a job. The first one, of job 0, says it is ready."""

    key: int
    seconds: float = 0.0
    data: bytes = b""
    error: str | None = None


def compile_job(backend: Backend, job: Job, max_bytes: int) -> Outcome:
    """Compile a job's grammar, here and now."""
    assert job.spec is not None, "cancellations are not compiled"
    started_at = time.monotonic()
    try:
        data = backend.compile(job.spec)
    except GrammarError as error:
        return Outcome(job.key, time.monotonic() - started_at, error=str(error))
    except MemoryError:
        return Outcome(job.key, time.monotonic() - started_at, error=out_of_memory())
    except Exception as error:  # ours or the backend's; it costs this job alone
        logger.exception("A grammar that cannot be compiled was not foreseen")
        words = f"internal error: {type(error).__name__}: {error}"
        return Outcome(job.key, time.monotonic() - started_at, error=words)
    if len(data) > max_bytes:
        words = f"compiled it takes {len(data)} bytes, the limit is {max_bytes}; simplify it."
        return Outcome(job.key, time.monotonic() - started_at, error=words)
    return Outcome(job.key, time.monotonic() - started_at, data)


def out_of_memory() -> str:
    """Words for a grammar that is too big to compile."""
    return f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory; simplify it."


def out_of_time(limit_s: float) -> str:
    """Words for a grammar that takes too long to compile."""
    return f"compiling it takes longer than the limit of {limit_s:g} s; simplify it."


@dataclass(slots=True)
class _Fork:
    """A process that compiles one job."""

    key: int
    pid: int
    deadline: float  # by the clock, should it get little CPU time
    output: bytearray = field(default_factory=bytearray)


class Child:
    """Starts forks, collects what they say, and ends those that take too long."""

    def __init__(self, backend: Backend, setup: Setup) -> None:
        self._backend = backend
        self._setup = setup
        self._jobs: deque[Job] = deque()
        self._forks: dict[int, _Fork] = {}  # by descriptor of the pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def run(self, reader: FrameReader) -> None:
        """Serve until standard input closes."""
        _answer(Outcome(0))
        while True:
            while (message := reader.take()) is not None:
                self._take(msgspec.msgpack.decode(message, type=Job))
            while self._jobs and len(self._forks) < MAX_FORKS:
                self._start(self._jobs.popleft())
            for key, _ in self._selector.select(self._patience()):
                if key.fd != 0:
                    self._read(key.fd)
                elif not reader.read(0):
                    return
            self._end_late()

    def _take(self, job: Job) -> None:
        if job.spec is not None:
            self._jobs.append(job)
            return
        self._jobs = deque(waiting for waiting in self._jobs if waiting.key != job.key)
        for descriptor, fork in list(self._forks.items()):
            if fork.key == job.key:
                self._end(descriptor, kill=True)

    def _start(self, job: Job) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _be_fork(self._backend, job, self._setup, write_end)
        os.close(write_end)
        deadline = time.monotonic() + CLOCK_PER_CPU_TIME * self._setup.time_limit_s
        self._forks[read_end] = _Fork(job.key, pid, deadline)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _read(self, descriptor: int) -> None:
        fork = self._forks.get(descriptor)
        if fork is None:  # it was ended in this round
            return
        chunk = os.read(descriptor, 1 << 20)
        fork.output += chunk
        if chunk:
            return
        status = self._end(descriptor, kill=False)  # it exits: its pipe is closed
        if status == 0:
            _write(bytes(fork.output))
            return
        if status == -signal.SIGPROF:
            self._answer_late(fork)
            return
        words = "the compiler crashed over it" + (
            f" ({signal.Signals(-status).name})." if status < 0 else f" (exit code {status})."
        )
        _answer(Outcome(fork.key, error=words))

    def _end_late(self) -> None:
        now = time.monotonic()
        for descriptor, fork in list(self._forks.items()):
            if fork.deadline <= now:
                self._end(descriptor, kill=True)
                self._answer_late(fork)

    def _answer_late(self, fork: _Fork) -> None:
        limit_s = self._setup.time_limit_s
        _answer(Outcome(fork.key, limit_s, error=out_of_time(limit_s)))

    def _end(self, descriptor: int, *, kill: bool) -> int:
        """Wait for the end of a fork; its exit code, negative for a signal."""
        fork = self._forks.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if kill:
            os.kill(fork.pid, signal.SIGKILL)
        _, status = os.waitpid(fork.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _patience(self) -> float | None:
        if not self._forks:
            return None
        return max(min(fork.deadline for fork in self._forks.values()) - time.monotonic(), 0.0)


def _be_fork(backend: Backend, job: Job, setup: Setup, write_end: int) -> None:
    """Compile, write the outcome, exit. Never returns."""
    status = 1
    try:
        _die_with_parent()
        with contextlib.suppress(OSError):
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        _limit_memory()
        # SIGPROF ends it. A busy machine may take long to give it so much, for no fault of its own.
        signal.setitimer(signal.ITIMER_PROF, setup.time_limit_s)
        outcome = compile_job(backend, job, setup.max_compiled_bytes)
        _write(frame(msgspec.msgpack.encode(outcome)), write_end)
        status = 0
    finally:
        os._exit(status)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends, however that may be."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(outcome: Outcome) -> None:
    _write(frame(msgspec.msgpack.encode(outcome)))


def _write(data: bytes, descriptor: int = 1) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def run_child(make_backend: Callable[[Vocabulary], Backend]) -> None:
    """Be the child: serve until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends forks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    os.nice(NICENESS)
    reader = FrameReader()
    while (message := reader.take()) is None:
        if not reader.read(0):
            return
    setup = msgspec.msgpack.decode(message, type=Setup)
    with contextlib.suppress(BrokenPipeError):  # whoever wanted an answer is gone
        Child(make_backend(setup.vocabulary), setup).run(reader)


def _xgrammar(vocabulary: Vocabulary) -> Backend:
    from trunkline.engine.grammar.xgrammar_backend import XgrammarBackend  # once niced

    return XgrammarBackend(vocabulary)


if __name__ == "__main__":
    run_child(_xgrammar)
