"""Runs schedules through the whole engine's loop, and says what clients saw.

The scheduler, the loop, the grammars' masks and the client's streams are the real ones; device and
grammars are fakes. A schedule gives the same messages in the same turns at every overlap depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from tests.engine.overlap.device import Accident, Device
from tests.engine.overlap.grammars import AutomatonBackend, AutomatonCompiler
from tests.engine.overlap.schedules import Abort, Schedule, letter

from trunkline._core import Core
from trunkline.engine import messages
from trunkline.engine.channel import Message
from trunkline.engine.core_config import CoreConfig
from trunkline.engine.grammar.backend import Vocabulary
from trunkline.engine.grammar.constrained_runner import ConstrainedRunner
from trunkline.engine.grammar.constraints import Constraints, GrammarCache
from trunkline.engine.grammar.masks import MaskSource
from trunkline.engine.loop import EngineLoop, LoopOptions
from trunkline.engine.messages import Submit
from trunkline.engine.stream import RequestRefused, Sample, Stream
from trunkline.plan import Plan

CLIENT = 1
STUCK_TURNS = 2000


class CheckedCore:
    """A core that checks its integrity after each call that changes something."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.in_flight = 0
        self.most_in_flight = 0

    def plan(self, now: float, arena: Any) -> int | None:
        step = self._core.plan(now, arena)
        self._core.check_integrity()
        self.in_flight += step is not None
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return step

    def commit(self, now: float, result: Any) -> None:
        self._core.commit(now, result)
        self._core.check_integrity()
        self.in_flight -= 1

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._core, name)
        if name not in ("submit", "abort", "ready", "flush_cache"):
            return call

        def checked(*arguments: Any, **named: Any) -> Any:
            value = call(*arguments, **named)
            self._core.check_integrity()
            return value

        return checked


@dataclass
class Witness:
    """A runner whose failed steps are noted: the seeds of their sequences."""

    runner: Any
    victims: set[int]
    seeds: dict[int, int] = field(default_factory=dict)  # by slot, as launched

    def watched(self, plan: Plan) -> AbstractContextManager[None]:
        return self.noting({self.seeds[slot] for slot in plan.row_slot.tolist()})

    @contextmanager
    def noting(self, seeds: set[int]) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.victims |= seeds
            raise

    def forward(self, plan: Plan) -> None:
        self.seeds |= dict(zip(plan.opened_slots.tolist(), plan.opened_seed.tolist(), strict=True))
        with self.watched(plan):
            self.runner.forward(plan)

    def awaits_earlier(self, plan: Plan) -> bool:
        return False

    def sample(self, plan: Plan, masks: Any = None) -> Any:
        with self.watched(plan):
            return Watched(self.watched(plan), self.runner.sample(plan, masks))


@dataclass
class Watched:
    guard: AbstractContextManager[None]
    pending: Any

    def wait(self) -> Any:
        with self.guard:
            return self.pending.wait()


@dataclass
class Port:
    """The client's side: says what the schedule says, and keeps the streams."""

    schedule: Schedule
    streams: dict[int, Stream]
    turn: int = -1
    stop: Callable[[], None] = lambda: None
    died: bool = False
    num_deaths: int = 0
    flushed: bool = False
    idle_turns: int = 0
    incoming: list[Message] = field(default_factory=list)
    waiting: list[Abort] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = [abort for abort in self.schedule.aborts if abort.turn is None]

    @property
    def ended(self) -> bool:
        complete = len(self.streams) == len(self.schedule.requests)
        return complete and all(is_over(stream) for stream in self.streams.values())

    def receive(self, timeout_s: float) -> list[Message]:
        self.turn += 1
        self.incoming += self._due()
        if self.turn in self.schedule.deaths:
            self.died = True
            self.stop()
            return []
        taken, self.incoming = self.incoming, []
        self.idle_turns = 0 if taken or timeout_s == 0 else self.idle_turns + 1
        assert max(self.idle_turns, self.turn / 10) < STUCK_TURNS, "requests are stuck"
        if self.flushed:
            self.stop()
        return taken

    def _due(self) -> list[Message]:
        schedule, due = self.schedule, []
        for index, turn in enumerate(schedule.turns):
            if turn == self.turn:
                due.append(self.submit(index))
        for abort in schedule.aborts:
            if abort.turn == self.turn:
                due.append(self.abort(abort))
        if self.turn in schedule.flushes:
            due.append(message(messages.CONTROL, messages.Control(1, "flush_cache")))
        return due

    def submit(self, index: int) -> Message:
        request = self.schedule.requests[index]
        key = index + 1
        stream = self.streams.get(key)
        resume = []
        if stream is None:
            stream = self.streams[key] = Stream(request, key, 1, lambda _: None)
        elif stream._num_tokens:
            resume = stream.progress()
        return message(
            messages.SUBMIT,
            Submit(
                key=key,
                rid=request.rid,
                prompt=request.prompt_ids,
                sampling=request.sampling,
                n=request.n,
                stream_interval=request.stream_interval,
                priority=request.priority,
                namespace=request.namespace,
                request_class=request.request_class,
                logprobs=request.logprobs,
                pooled=request.pooled,
                resume=resume,
                must_prepare=request.grammar is not None,
                grammar=request.grammar,
            ),
        )

    def abort(self, abort: Abort) -> Message:
        stream = self.streams.get(abort.request + 1)
        if stream is not None:
            stream.want_end(abort.message.rid)
        return message(messages.ABORT, abort.message)

    def send(self, client: int, blob: bytes) -> bool:
        for event in msgspec.msgpack.decode(blob, type=list[messages.Event]):
            if isinstance(event, messages.ControlReply):
                self.flushed = event.key == 2
                if self.flushed:
                    assert event.value["flushed"], "a cache of ended requests is in use"
                continue
            stream = self.streams[event.key]
            if is_over(stream):
                assert self.num_deaths, "an event came after the end"
                continue  # of samples that had ended before the engine died
            stream.apply(event, 0.0)
            for abort in [one for one in self.waiting if one.request + 1 == event.key]:
                if stream._num_tokens >= abort.after:
                    self.waiting.remove(abort)
                    self.incoming.append(self.abort(abort))
        if self.ended:  # perhaps with steps in flight
            self.incoming.append(message(messages.CONTROL, messages.Control(2, "flush_cache")))
        return True

    def wake(self) -> None:
        pass


def message(kind: bytes, payload: msgspec.Struct) -> Message:
    return Message(CLIENT, kind, msgspec.msgpack.encode(payload))


@dataclass
class Run:
    """What a schedule has led to. `victims` are seeds of sequences that were in failed steps."""

    streams: dict[int, Stream]
    victims: set[int]
    most_in_flight: int


Wrap = Callable[[Device], Any]


def run(schedule: Schedule, depth: int, *, lazy: float = 0.7, wrap: Wrap = lambda one: one) -> Run:
    """Run a schedule to its end; check what must hold whatever happens.

    `wrap` makes a runner of the device.
    """
    config = replace(schedule.config, overlap_depth=depth)
    port = Port(schedule, {})
    result = Run(port.streams, set(), 0)
    while True:
        core = CheckedCore(Core(config.to_json()))
        device = Device(
            vocab_size=config.vocab_size,
            page_size=config.page_size,
            num_pages=config.num_pages,
            num_slots=config.max_running_requests,
            max_context_len=config.max_context_len,
            seed=schedule.seed + port.num_deaths,
            lazy=lazy,
            faults=schedule.faults,
        )
        port.died = False
        try:
            _serve(core, Witness(wrap(device), result.victims), port, config)
        except Accident:  # too many steps in a row have failed
            port.died = True
        result.most_in_flight = max(result.most_in_flight, core.most_in_flight)
        if not port.died:
            break
        port.num_deaths += 1
        _resubmit(port)
    stats = core.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["free_tokens"] == stats["total_tokens"]
    return result


def _serve(core: CheckedCore, runner: Any, port: Port, config: CoreConfig) -> None:
    end_id = config.eos_token_ids[0]
    compiler = AutomatonCompiler(config.vocab_size, end_id)
    constraints = Constraints(core, compiler, GrammarCache())
    vocabulary = Vocabulary(
        tokens=[letter(one) for one in range(config.vocab_size)],
        special_ids={},
        end_ids=[end_id],
        tokenizer_json="",
    )
    backend = AutomatonBackend()
    jump = config.overlap_depth <= 1  # as in `grammar/setup.py`
    source = MaskSource(backend, constraints, vocabulary, jump_forward=jump)
    options = LoopOptions(
        arena_bytes=config.arena_bytes,
        overlap_depth=config.overlap_depth,
        max_total_tokens=config.num_pages * config.page_size,
        beat=lambda: None,
        preparer=constraints,
    )
    loop = EngineLoop(core, ConstrainedRunner(runner, source), port, options)
    port.stop = loop.stop
    loop.run()
    assert backend.misuses == []


def _resubmit(port: Port) -> None:
    """Give what was in flight to the next engine, as a client does."""
    port.incoming = []
    for key, stream in port.streams.items():
        if not is_over(stream) and not stream.end_aborted(0.0):
            stream.resubmitted(key, 1)
            port.incoming.append(port.submit(key - 1))
    if port.ended:
        port.incoming.append(message(messages.CONTROL, messages.Control(2, "flush_cache")))


def is_over(stream: Stream) -> bool:
    return stream._error is not None or not stream._unfinished


def is_late(stream: Stream) -> bool:
    """Whether it was not run because it had waited too long."""
    if isinstance(stream._error, RequestRefused):
        return stream._error.status == 503
    ends = [sample.finished for sample in stream.samples if sample.finished is not None]
    return any(end.status == 503 for end in ends)


def outcome(stream: Stream) -> Any:
    """All that a client sees."""
    if isinstance(stream._error, RequestRefused):
        return (stream._error.status, str(stream._error))
    return [
        (
            sample.output_ids,
            sample.text,
            msgspec.to_builtins(sample.output_logprobs),
            _prompt_logprobs(sample),
            sample.finished.reason,
            sample.finished.matched,
            sample.finished.status,
            sample.finished.completion_tokens,
            sample.finished.pooled_state,
        )
        for sample in stream.samples
        if sample.finished is not None
    ]


def _prompt_logprobs(sample: Sample) -> str:
    """As text, because there may be a NaN; those of a row that fails depend on the chunks."""
    failed = sample.finished is not None and sample.finished.reason == "error"
    return "" if failed else repr(msgspec.to_builtins(sample.prompt_logprobs))


def assert_alike(one: Stream, other: Stream) -> None:
    """What one sample has of tokens begins as what the other has."""
    for ours, theirs in zip(one.samples, other.samples, strict=True):
        common = min(len(ours.output_ids), len(theirs.output_ids))
        assert ours.output_ids[:common] == theirs.output_ids[:common]
