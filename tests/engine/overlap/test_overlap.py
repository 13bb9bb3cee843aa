"""With steps in flight everything is as without: outputs, errors, ends, memory."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import pytest
from tests.engine.overlap.runner_thread import RunnerThread
from tests.engine.overlap.running import Run, Wrap, assert_alike, is_late, outcome, run
from tests.engine.overlap.schedules import Schedule, random_schedule


def assert_same(schedule: Schedule, one: Run, other: Run, changed: Set[int] = frozenset()) -> None:
    """All are equal, but for those that were disturbed: they begin alike.

    These are aborted, waited too long (the clock decides), or are in `changed`.
    """
    for key, stream in one.streams.items():
        twin = other.streams[key]
        if key - 1 in schedule.disturbed | changed or is_late(stream) or is_late(twin):
            assert_alike(stream, twin)
        else:
            assert outcome(stream) == outcome(twin), f"request {key}"


def check(seed: int, depth: int = 1, wrap: Wrap = lambda device: device) -> int:
    """A schedule with and without overlap; how many steps were in flight at most."""
    schedule = random_schedule(seed)
    plain = run(schedule, 0)
    assert plain.most_in_flight <= 1
    ahead = run(schedule, depth, wrap=wrap)
    assert_same(schedule, plain, ahead)
    return ahead.most_in_flight


def check_accidents(seed: int, wrap: Wrap = lambda device: device) -> int:
    """A schedule whose steps fail now and then; how many sequences were in such steps."""
    schedule = random_schedule(seed, accidents=True)
    calm = replace(schedule.faults, forward=0.0, sample=0.0, wait=0.0)
    plain = run(replace(schedule, faults=calm), 0)
    ahead = run(schedule, 1, wrap=wrap)
    hit = {
        index
        for index, request in enumerate(schedule.requests)
        if request.n > 1 or signed(request.sampling.seed) in ahead.victims
    }
    assert_same(schedule, plain, ahead, hit)
    return len(ahead.victims)


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def test_random_schedules() -> None:
    assert max(check(seed) for seed in range(120)) == 2


def test_steps_that_fail_take_their_own_requests_only() -> None:
    assert sum(check_accidents(seed) for seed in range(40)) > 0


def test_a_runner_in_a_thread() -> None:
    assert max(check(seed, wrap=RunnerThread) for seed in range(20)) == 2
    for seed in range(20):
        check_accidents(seed, wrap=RunnerThread)


def test_two_steps_in_flight() -> None:
    assert max(check(seed, depth=2) for seed in range(20)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_random_schedules(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        match seed % 10:
            case 0:
                check(seed, depth=2)
            case 1:
                check(seed, wrap=RunnerThread)
            case 2:
                check_accidents(seed)
            case 3:
                check_accidents(seed, wrap=RunnerThread)
            case _:
                check(seed)
