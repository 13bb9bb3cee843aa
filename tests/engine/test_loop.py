"""The loop: its order of calls, idleness, failures, log lines, and depth."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from tests.engine.fakes import FakeCore, FakeRunner

from trunkline.engine import messages
from trunkline.engine.channel import Message
from trunkline.engine.loop import EngineLoop, Entered, LoopOptions, Preparer
from trunkline.engine.messages import SamplingParams, Submit
from trunkline.engine.step_log import StepLog
from trunkline.kernels import Finished
from trunkline.plan import Plan


class ScriptedPort:
    """Hands out prepared messages turn by turn; stops the loop when they are used up."""

    def __init__(self, *turns: list[Message]) -> None:
        self.turns = list(turns)
        self.waits: list[float] = []
        self.sent: list[messages.Event] = []
        self.gone: set[int] = set()
        self.loop: EngineLoop | None = None

    def receive(self, timeout_s: float) -> list[Message]:
        self.waits.append(timeout_s)
        if not self.turns:
            if timeout_s > 0 and self.loop is not None:
                self.loop.stop()
            return []
        return self.turns.pop(0)

    def send(self, client: int, blob: bytes) -> bool:
        if client in self.gone:
            return False
        self.sent += msgspec.msgpack.decode(blob, type=list[messages.Event])
        return True

    def wake(self) -> None:
        pass


def submit(key: int, prompt: list[int], tokens: int = 3, client: int = 1) -> Message:
    sampling = SamplingParams(max_new_tokens=tokens)
    payload = Submit(key=key, rid=f"r{key}", prompt=prompt, sampling=sampling)
    return Message(client, messages.SUBMIT, msgspec.msgpack.encode(payload))


def run(
    port: ScriptedPort,
    core: FakeCore | None = None,
    runner: FakeRunner | None = None,
    preparer: Preparer | None = None,
    entered: Entered | None = None,
) -> FakeCore:
    core = core or FakeCore()
    options = LoopOptions(
        arena_bytes=1 << 16,
        overlap_depth=core.depth,
        log_interval_steps=2,
        max_total_tokens=160,
        beat=lambda: None,
        entered=entered,
    )
    if preparer is not None:
        options = replace(options, preparer=preparer)
    port.loop = EngineLoop(core, runner or FakeRunner(), port, options)
    port.loop.run()
    return core


def outputs(port: ScriptedPort) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for event in port.sent:
        if isinstance(event, messages.Delta | messages.Finished):
            assert len(tokens.setdefault(event.key, [])) == event.token_offset
            tokens[event.key] += event.token_ids
    return tokens


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_depth_gives_the_same_tokens(depth: int) -> None:
    port = ScriptedPort([submit(1, [10]), submit(2, [50], 5)], [submit(3, [70], 2)])
    run(port, FakeCore(depth))
    assert outputs(port) == {1: [11, 12, 13], 2: [51, 52, 53, 54, 55], 3: [71, 72]}
    finished = [event.key for event in port.sent if isinstance(event, messages.Finished)]
    assert sorted(finished) == [1, 2, 3]


def test_steps_alternate_without_overlap_and_lead_by_one_with_it() -> None:
    for depth, expected in (
        (0, ["plan 1", "commit", "plan 2", "commit"]),
        (1, ["plan 1", "plan 2", "commit", "commit"]),
    ):
        core = run(ScriptedPort([submit(1, [10], 2)]), FakeCore(depth))
        assert core.log == expected


def test_an_idle_loop_waits_and_a_busy_one_does_not() -> None:
    port = ScriptedPort([], [submit(1, [10], 2)])
    run(port)
    assert port.waits == [1.0, 1.0, 0.0, 0.0, 1.0]
    core = FakeCore()
    core.deadline = time.time() + 0.2
    port = ScriptedPort()
    run(port, core)
    assert 0.0 < port.waits[0] <= 0.2


def test_acceptance_is_sent_before_the_step() -> None:
    seen: list[messages.Event] = []
    port = ScriptedPort([submit(1, [10], 1), submit(2, [13])])
    run(port, runner=FakeRunner(lambda _: seen.extend(port.sent)))
    assert [type(event) for event in seen] == [messages.Accepted, messages.Refused]


def test_a_step_that_fails_ends_its_own_requests_only() -> None:
    calls = []

    def fail_first(plan: Plan) -> None:
        calls.append(plan.step)
        if len(calls) == 1:
            raise RuntimeError("out of memory")

    port = ScriptedPort([submit(1, [10])], [submit(2, [20])])
    run(port, runner=FakeRunner(fail_first))
    finished = {e.key: e.reason for e in port.sent if isinstance(e, messages.Finished)}
    assert finished == {1: "error", 2: "length"}


def test_a_runner_that_keeps_failing_ends_the_loop() -> None:
    def fail(_: Plan) -> None:
        raise RuntimeError("device lost")

    port = ScriptedPort(*([submit(key, [10])] for key in range(9)))
    with pytest.raises(RuntimeError, match="device lost"):
        run(port, runner=FakeRunner(fail))


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_step_is_the_first_to_compute_is_told_before_it_is_launched(depth: int) -> None:
    told: list[tuple[int, int]] = []
    known_at_launch: list[int] = []
    core = FakeCore(depth)
    port = ScriptedPort([submit(1, [10])], [submit(2, [20]), submit(3, [30])])
    runner = FakeRunner(lambda _: known_at_launch.append(len(told)))
    run(port, core, runner, entered=told.extend)
    assert told == [(1, 1), (1, 2), (1, 3)]
    assert known_at_launch[:2] == [1, 3]


class Launcher(FakeRunner):
    """Notes in the core's log what is launched and waited for; may fail when waited for."""

    def __init__(self, core: FakeCore, *, awaits: bool = False, fails_at: int = 0) -> None:
        super().__init__(lambda plan: core.log.append(f"forward {plan.step}"))
        self.core = core
        self.awaits = awaits
        self.fails_at = fails_at

    def awaits_earlier(self, plan: Plan) -> bool:
        return self.awaits

    def sample(self, plan: Plan) -> Waited:
        self.core.log.append(f"sample {plan.step}")
        return Waited(self, plan.step, super().sample(plan))


@dataclass
class Waited:
    launcher: Launcher
    step: int
    result: Finished

    def wait(self) -> np.ndarray:
        self.launcher.core.log.append(f"wait {self.step}")
        if self.step == self.launcher.fails_at:
            raise RuntimeError("the device lost it")
        return self.result.wait()


def test_a_step_is_launched_before_the_one_before_is_waited_for() -> None:
    core = FakeCore(1)
    run(ScriptedPort([submit(1, [10], 2)]), core, Launcher(core))
    assert core.log == [
        *("plan 1", "forward 1", "sample 1"),
        *("plan 2", "forward 2", "sample 2", "wait 1", "commit"),
        *("wait 2", "commit"),
    ]


def test_a_step_that_needs_the_tokens_before_it_is_sampled_after_their_commit() -> None:
    core = FakeCore(1)
    port = ScriptedPort([submit(1, [10], 3)])
    run(port, core, Launcher(core, awaits=True))
    assert core.log == [
        *("plan 1", "forward 1", "sample 1"),
        *("plan 2", "forward 2", "wait 1", "commit", "sample 2"),
        *("plan 3", "forward 3", "wait 2", "commit", "sample 3"),
        *("wait 3", "commit"),
    ]
    assert outputs(port) == {1: [11, 12, 13]}


def test_after_a_step_that_failed_none_is_launched_until_all_are_committed() -> None:
    core = FakeCore(1)
    port = ScriptedPort([submit(1, [10], 9)], [submit(2, [20], 4)])
    run(port, core, Launcher(core, fails_at=1))
    finished = {e.key: e.reason for e in port.sent if isinstance(e, messages.Finished)}
    assert finished == {1: "error", 2: "length"}
    after = core.log[core.log.index("wait 1") :]
    assert after[:5] == ["wait 1", "commit", "wait 2", "commit", "plan 3"]


def test_a_loop_that_stops_waits_for_what_is_in_flight() -> None:
    core = FakeCore(1)
    port = ScriptedPort([submit(1, [10], 9)])
    launcher = Launcher(core)
    forward = launcher.forward

    def stop_at_3(plan: Plan) -> None:
        forward(plan)
        if plan.step == 3 and port.loop is not None:
            port.loop.stop()

    launcher.forward = stop_at_3  # type: ignore[method-assign]
    run(port, core, launcher)
    assert core.log[-4:] == ["sample 3", "wait 2", "commit", "wait 3"]


def test_the_cache_is_flushed_when_no_step_is_in_flight() -> None:
    core = FakeCore(1)
    flush = messages.Control(1, "flush_cache")
    asked = Message(1, messages.CONTROL, msgspec.msgpack.encode(flush))
    run(ScriptedPort([submit(1, [10], 9)], [], [asked]), core, Launcher(core))
    at = core.log.index("flush")
    assert core.log[:at].count("commit") == int(core.log[at - 2].removeprefix("wait "))
    assert core.log[at - 1] == "commit"


def test_a_malformed_request_is_refused_and_the_loop_goes_on() -> None:
    bad = Message(1, messages.SUBMIT, msgspec.msgpack.encode([7, "rid", "no prompt"]))
    port = ScriptedPort([bad, submit(1, [10], 1), Message(1, b"?", b"")])
    run(port)
    refused = [event for event in port.sent if isinstance(event, messages.Refused)]
    assert [(event.key, event.status) for event in refused] == [(7, 400)]
    assert outputs(port) == {1: [11]}


class BrokenPreparer:
    """Takes no request."""

    def prepare(self, request: int, message: bytes) -> None:
        raise ValueError("out of pencils")

    def poll(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def test_a_request_that_cannot_be_prepared_is_refused_and_leaves_the_core() -> None:
    held = Submit(key=5, rid="r5", prompt=[10], sampling=SamplingParams(), must_prepare=True)
    port = ScriptedPort([Message(1, messages.SUBMIT, msgspec.msgpack.encode(held))], [])
    core = run(port, preparer=BrokenPreparer())
    refused = [event for event in port.sent if isinstance(event, messages.Refused)]
    assert [(event.key, event.message) for event in refused] == [(5, "out of pencils")]
    assert core.requests == {}


def test_requests_of_a_client_that_is_gone_are_aborted() -> None:
    port = ScriptedPort([submit(1, [10], 10**9, client=2), submit(1, [20], 2, client=1)])
    port.gone.add(2)
    core = run(port)
    assert core.log.count("abort 2 None None") >= 1
    assert outputs(port) == {1: [21, 22]}


def stats(**values: float) -> dict[str, float]:
    names = (
        "num_running num_waiting used_tokens prompt_tokens_total cached_tokens_total "
        "generated_tokens_total admitted_sequences_total retracted_requests_total new_token_ratio"
    )
    return dict.fromkeys(names.split(), 0.0) | values


def test_log_lines_have_the_format_that_tools_parse(caplog: pytest.LogCaptureFixture) -> None:
    now = stats()
    with caplog.at_level(logging.INFO, logger="trunkline.engine.loop"):
        log = StepLog(lambda: dict(now), 2, 100, logging.getLogger("trunkline.engine.loop"))
        log.step(idle=True)
        time.sleep(0.11)
        now |= {"prompt_tokens_total": 49, "cached_tokens_total": 1, "admitted_sequences_total": 1}
        now |= {"num_running": 3, "used_tokens": 50, "num_waiting": 2}
        log.step(idle=False)
        now |= {"generated_tokens_total": 7}
        log.step(idle=False)
        log.step(idle=False)
        time.sleep(1.01)
        now |= {"prompt_tokens_total": 50, "retracted_requests_total": 2, "new_token_ratio": 0.5}
        log.step(idle=True)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "Prefill batch. #new-seq: 1, #new-token: 49, #cached-token: 1, cache hit rate: 2.00%, "
        "token usage: 0.50, #running-req: 3, #queue-req: 2"
    )
    assert lines[1].startswith(
        "Decode batch. #running-req: 3, #token: 50, token usage: 0.50, gen throughput (token/s): "
    )
    assert lines[1].endswith(", #queue-req: 2")
    assert lines[2].startswith("Prefill batch. #new-seq: 0, #new-token: 1, #cached-token: 0")
    assert lines[3:] == [
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, "
        "#new_token_ratio: 0.0000 -> 0.5000"
    ]


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_the_throughput_is_known_without_log_lines_and_zero_when_idle(level: int) -> None:
    logger = logging.getLogger(f"trunkline.test.{level}")
    logger.setLevel(level)
    now = stats()
    log = StepLog(lambda: dict(now), 2, 100, logger)
    now |= {"generated_tokens_total": 7}
    for _ in range(2):
        log.step(idle=False)
    assert log.gen_throughput > 0
    log.step(idle=True)
    assert log.gen_throughput == 0


def test_the_arena_is_reused_only_after_its_step_is_committed() -> None:
    addresses: list[int] = []

    def note(plan: Plan) -> None:
        addresses.append(plan.arena.__array_interface__["data"][0])

    run(ScriptedPort([submit(1, [10], 6)]), FakeCore(1), FakeRunner(note))
    assert len(set(addresses)) == 2
    assert all(a != b for a, b in itertools.pairwise(addresses))
    assert np.all(np.array(addresses) % 8 == 0)
