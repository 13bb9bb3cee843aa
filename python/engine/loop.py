"""The engine's loop: receive -> plan -> launch -> commit -> send.

It joins a scheduler (`Core`), a runner and a port, and knows nothing of what a request asks for or
which model runs. It has no prefill or decode phases: the plan says what a step computes. With an
overlap depth of k it launches k more steps before it waits for the oldest and commits it, so that
the device works while the scheduler does; nothing else differs, and no output does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trunkline.engine import messages
from trunkline.engine.channel import Message, Port
from trunkline.engine.step_log import StepLog
from trunkline.plan import ROW_FAILED, Plan, encode_result

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trunkline.kernels.interface import PendingResult

Bytes = npt.NDArray[np.uint8]
Verb = Callable[[Mapping[str, object]], dict[str, object]]
Entered = Callable[[list[tuple[int, int]]], None]

IDLE_BEAT_S: Final = 1.0  # an idle loop shows that it is alive this often
SETTLED_VERBS: Final = frozenset({"flush_cache"})  # refused by the core while steps are in flight
# In a row, besides those in flight with the first; beyond it the device or the model is broken.
MAX_FAILED_STEPS: Final = 3


class Scheduler(Protocol):
    """What the loop needs of `trunkline._core.Core`; see there."""

    def submit(self, client: int, message: bytes, now: float) -> int | None: ...
    def abort(self, client: int | None, key: int | None, rid: str | None) -> int: ...
    def plan(self, now: float, arena: Buffer) -> int | None: ...
    def take_entered(self) -> list[tuple[int, int]]: ...
    def commit(self, now: float, result: Buffer) -> None: ...
    def take_events(self) -> list[tuple[int, bytes]]: ...
    def has_work(self) -> bool: ...
    def next_deadline(self) -> float | None: ...
    def flush_cache(self) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def check_integrity(self) -> None: ...


class Preparer(Protocol):
    """Prepares the requests that the core holds back; never waits."""

    def prepare(self, request: int, message: bytes) -> None:
        """Begin; `message` is the request's `Submit`."""

    def poll(self) -> None:
        """Tell the core which are ready."""

    def stats(self) -> dict[str, float]:
        """Gauges and cumulative counters by name."""

    def close(self) -> None:
        """Let go of everything: the loop has ended."""


class _NothingHeldBack:
    """The preparer of a loop whose requests need no preparation."""

    def prepare(self, request: int, message: bytes) -> None:
        raise RuntimeError("this engine prepares no requests")

    def poll(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Executor(Protocol):
    """What the loop needs of a runner: it launches steps, which take effect in this order."""

    def forward(self, plan: Plan) -> None:
        """Begin a step; `sample` must follow, before the next step's `forward`."""

    def awaits_earlier(self, plan: Plan) -> bool:
        """Whether `sample` needs all results of earlier steps to have been waited for.

        Asked between `forward` and `sample`.
        """

    def sample(self, plan: Plan) -> PendingResult:
        """End a step. Its plan's arena is read until the result has been waited for."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The `PendingResult` of a step that could not be launched."""

    error: Exception

    def wait(self) -> Bytes:
        raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How a loop runs.

    `beat` is called each time it goes round, `entered` with the requests (client and key each) that
    the next step is the first to compute, before it is launched; `verbs` add control messages;
    `preparer` sees to the requests that the core holds back.
    """

    arena_bytes: int
    overlap_depth: int = 0
    log_interval_steps: int = 40
    max_total_tokens: int
    beat: Callable[[], None]
    entered: Entered | None = None
    preparer: Preparer = field(default_factory=_NothingHeldBack)
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger(__name__))
    verbs: Mapping[str, Verb] = field(default_factory=dict)


class EngineLoop:
    """Runs one engine in the thread that calls `run`."""

    def __init__(self, core: Scheduler, runner: Executor, port: Port, options: LoopOptions) -> None:
        self._core = core
        self._runner = runner
        self._port = port
        self._beat = options.beat
        self._entered = options.entered
        preparer = self._preparer = options.preparer
        self._depth = options.overlap_depth
        # A plan is read until its step is committed: one arena for each step in flight.
        self._arenas = deque(
            np.zeros(options.arena_bytes, dtype=np.uint8) for _ in range(self._depth + 1)
        )
        self._in_flight: deque[tuple[Plan, PendingResult]] = deque()
        self._logger = options.logger
        log = self._log = StepLog(
            core.stats, options.log_interval_steps, options.max_total_tokens, options.logger
        )
        # They hold no reference to the loop: without a cycle, memory comes back when it ends.
        self._verbs: dict[str, Verb] = {
            "flush_cache": lambda _: {"flushed": core.flush_cache()},
            "stats": lambda _: {
                **core.stats(),
                **preparer.stats(),
                "gen_throughput": log.gen_throughput,
            },
            "check_integrity": lambda _: _checked(core),
            **options.verbs,
        }
        self._failed_steps = 0
        self._stopping = False

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            Exception: the scheduler or the runner is broken; nothing more can be computed.
        """
        moved = False
        try:
            while not self._stopping:
                self._beat()
                self._receive(0.0 if moved else self._patience())
                moved = self._step()
            for _, pending in self._in_flight:
                with suppress(Exception):  # the runner may be closed now, and its results are lost
                    pending.wait()
        finally:
            self._preparer.close()

    def stop(self) -> None:
        """Make `run` return after the current step. May be called from any thread."""
        self._stopping = True
        self._port.wake()

    def _step(self) -> bool:
        """Plan and launch one step, commit the oldest that is due; False: nothing to do."""
        self._preparer.poll()
        plan = self._plan()
        if plan is None:
            moved = self._commit_oldest()
        else:
            moved = True
            pending = self._launch(plan)
            self._in_flight.append((plan, pending))
            if isinstance(pending, Failed):
                self._commit_all()
            while len(self._in_flight) > self._room:
                self._commit_oldest()
        self._log.step(idle=plan is None)
        return moved

    @property
    def _room(self) -> int:
        """Steps that may stay in flight: none after one that failed, until another goes well."""
        return 0 if self._failed_steps else self._depth

    def _plan(self) -> Plan | None:
        arena = self._arenas[0]
        step = self._core.plan(time.time(), arena.data)
        self._send_events()  # acceptances and refusals do not wait for the step
        if (entered := self._core.take_entered()) and self._entered is not None:
            self._entered(entered)
        if step is None:
            return None
        self._arenas.rotate(-1)
        return Plan(arena)

    def _launch(self, plan: Plan) -> PendingResult:
        """Begin a step, and end it as soon as what its tokens depend on is known."""
        try:
            self._runner.forward(plan)
        except Exception as error:
            return Failed(error)
        if self._runner.awaits_earlier(plan):
            self._commit_all()
        try:
            return self._runner.sample(plan)
        except Exception as error:
            return Failed(error)

    def _commit_all(self) -> None:
        while self._commit_oldest():
            continue

    def _commit_oldest(self) -> bool:
        """Wait for the oldest step in flight; False: there is none."""
        if not self._in_flight:
            return False
        result = self._result(*self._in_flight.popleft())
        self._core.commit(time.time(), result.data)
        self._send_events()
        return True

    def _result(self, plan: Plan, pending: PendingResult) -> Bytes:
        """Wait for a step; when it failed as a whole, its requests fail and the others go on."""
        try:
            result = pending.wait()
        except Exception:
            self._failed_steps += 1
            if self._failed_steps > MAX_FAILED_STEPS + self._depth:
                raise
            self._logger.exception("Step %d failed; its requests end with an error", plan.step)
            return encode_result(
                plan.step,
                {
                    "sample_counts": np.zeros(plan.sample_logit.size, dtype=np.int32),
                    "row_errors": np.full(plan.row_slot.size, ROW_FAILED, dtype=np.int32),
                },
            )
        self._failed_steps = 0
        return result

    def _patience(self) -> float:
        """How long an idle loop may wait for a message."""
        deadline = self._core.next_deadline()
        if deadline is None:
            return IDLE_BEAT_S
        return min(max(deadline - time.time(), 0.0), IDLE_BEAT_S)

    def _receive(self, timeout_s: float) -> None:
        for message in self._port.receive(timeout_s):
            if message.kind == messages.SUBMIT:
                self._submit(message)
            elif message.kind == messages.ABORT:
                self._abort(message)
            elif message.kind == messages.CONTROL:
                self._control(message)
            else:
                self._logger.error("Dropped a message of unknown kind %r", message.kind)

    def _send_events(self) -> None:
        for client, blob in self._core.take_events():
            self._send(client, blob)

    def _send(self, client: int, blob: bytes) -> None:
        if not self._port.send(client, blob):
            self._core.abort(client, None, None)

    def _submit(self, message: Message) -> None:
        request = None
        try:
            request = self._core.submit(message.client, message.payload, time.time())
            if request is not None:
                self._preparer.prepare(request, message.payload)
        except Exception as error:  # malformed, so no event follows by itself
            self._logger.error("Refused a malformed request: %s", error)
            key = msgspec.msgpack.decode(message.payload)[0]
            if request is not None:  # the core has it, and would hold it back for ever
                self._core.abort(message.client, key, None)
            refusal = messages.Refused(key, 400, "invalid_request_error", str(error), None)
            self._send(message.client, msgspec.msgpack.encode([refusal]))

    def _abort(self, message: Message) -> None:
        abort = msgspec.msgpack.decode(message.payload, type=messages.Abort)
        if abort.key is not None:
            self._core.abort(message.client, abort.key, None)
        elif abort.rid is not None or abort.all:
            self._core.abort(None, None, abort.rid)

    def _control(self, message: Message) -> None:
        control = msgspec.msgpack.decode(message.payload, type=messages.Control)
        if control.verb in SETTLED_VERBS:
            self._commit_all()
        verb = self._verbs.get(control.verb)
        try:
            if verb is None:
                raise ValueError(f"unknown control verb {control.verb!r}; known: {[*self._verbs]}")
            reply = messages.ControlReply(control.key, verb(control.arguments))
        except Exception as error:
            reply = messages.ControlReply(control.key, {}, f"{type(error).__name__}: {error}")
        self._send(message.client, msgspec.msgpack.encode([reply]))


def _checked(core: Scheduler) -> dict[str, object]:
    core.check_integrity()
    return {}
