"""Which requests a restarted engine gets, against all schedules of deaths and tokens."""

from __future__ import annotations

import itertools
import time

import hypothesis.strategies as st
from hypothesis import given

from trunkline.engine import messages
from trunkline.engine.entries import Begun
from trunkline.engine.messages import SamplingParams
from trunkline.engine.recovery import MAX_DEATHS, MAX_IDLE_DEATHS, Recovery
from trunkline.engine.stream import Request, Stream


def stream(index: int) -> Stream:
    request = Request(
        rid=str(index), prompt_ids=[1], sampling=SamplingParams(), received_ts=time.time()
    )
    return Stream(request, index, 1, lambda _: None)


def gain(one: Stream) -> None:
    offset = len(one.samples[0].output_ids)
    one.apply(messages.Delta(one.key, 0, offset, [7], offset, "x"), 0.0)


def deaths_until_given_up(deadly: Stream, others: list[Stream]) -> int:
    """Play engines that die in every step that `deadly` is in, after the others' tokens."""
    recovery = Recovery()
    running = [*others[:1], deadly, *others[1:]]
    for death in range(1, 50):
        guilty = recovery.engine_died(running)
        if guilty is not None:
            assert guilty is deadly
            running = recovery.due()
            assert set(running) <= set(others)
            return death
        running = recovery.due()
        while running == [recovery.suspect] and recovery.suspect is not deadly:
            [suspect] = running
            suspect.resubmitted(0, 1)
            gain(suspect)
            assert recovery.is_cleared(suspect)
            recovery.test_ended(suspect, finished=False)
            running = recovery.due()
        for one in running:
            one.resubmitted(0, 1)
    raise AssertionError("never given up")


@given(st.integers(0, 5))
def test_the_deadly_one_is_found_and_only_it(count: int) -> None:
    others = [stream(i + 1) for i in range(count)]
    assert deaths_until_given_up(stream(0), others) == MAX_DEATHS + 1


class Engine:
    """Runs the first `width` of what it is given, and dies if `deadly` is among them."""

    def __init__(self, recovery: Recovery, width: int) -> None:
        self.recovery = recovery
        self.width = width
        self.keys = itertools.count(1)
        self.deaths = 0
        self.tried_alone: list[Stream] = []

    def until_given_up(self, streams: list[Stream], deadly: Stream) -> None:
        running = streams
        while self.deaths < 50:
            for one in running:
                one.resubmitted(next(self.keys), 1)
            entered = running[: self.width]
            if running == [self.recovery.suspect]:
                self.tried_alone += running
                if running != [deadly]:
                    gain(running[0])
                    self.recovery.test_ended(running[0], finished=False)
                    running = self.recovery.due()
                    continue
            self.deaths += 1
            keys = frozenset(one.key for one in entered)
            guilty = self.recovery.engine_died(running, Begun(keys))
            if guilty is not None:
                assert guilty is deadly
                return
            running = self.recovery.due()
        raise AssertionError("never given up")


@given(st.integers(0, 200), st.integers(1, 6), st.integers(0, 5))
def test_of_a_long_queue_only_those_that_ran_are_tried_alone(
    waiting: int, width: int, place: int
) -> None:
    """The engine dies in its first step, before any token, with the deadly one in it."""
    place = min(place, width - 1)
    streams = [stream(index) for index in range(width + waiting)]
    recovery = Recovery()
    engine = Engine(recovery, width)
    engine.until_given_up(streams, streams[place])
    assert set(engine.tried_alone) <= set(streams[:width])
    assert set(recovery.held) == set(streams) - {streams[place]}
    assert engine.deaths <= MAX_DEATHS + 1


@given(st.integers(1, 5), st.integers(1, 6))
def test_one_that_kills_before_it_runs_is_found_all_the_same(others: int, width: int) -> None:
    """It dies of reading the last request, whatever it has begun to run."""
    streams = [stream(index) for index in range(width + others)]
    engine = Engine(Recovery(), width)
    engine.until_given_up(streams, streams[-1])
    assert engine.deaths <= MAX_IDLE_DEATHS + 1


def test_where_nothing_was_begun_all_that_waited_are_suspected() -> None:
    recovery = Recovery()
    streams = [stream(0), stream(1)]
    for _ in range(MAX_DEATHS):
        assert recovery.engine_died(streams, Begun(frozenset())) is None
        running = recovery.due()
    assert running == [streams[0]] == [recovery.suspect]


def test_what_only_waits_is_not_suspected_of_what_other_clients_ran() -> None:
    recovery = Recovery()
    streams = [stream(0), stream(1)]
    for _ in range(MAX_IDLE_DEATHS - 1):
        assert recovery.engine_died(streams, Begun(frozenset(), others=True)) is None
        running = recovery.due()
        assert running == streams
        assert recovery.suspect is None


@given(st.lists(st.sampled_from(["die", "gain", "clear"]), max_size=30), st.integers(1, 4))
def test_no_request_is_lost_or_doubled(script: list[str], count: int) -> None:
    recovery = Recovery()
    streams = [stream(i) for i in range(count)]
    running, given_up = list(streams), []
    for word in script:
        if word == "die":
            guilty = recovery.engine_died(running)
            given_up += [guilty] if guilty else []
            running = recovery.due()
        elif word == "gain":
            for one in running:
                gain(one)
        elif recovery.suspect is not None and recovery.is_cleared(recovery.suspect):
            recovery.test_ended(recovery.suspect, finished=False)
            running = recovery.due()
        if word != "gain":
            for one in running:
                one.resubmitted(0, 1)
        everywhere = [*running, *recovery.held, *given_up]
        assert sorted(one.request.rid for one in everywhere) == [str(i) for i in range(count)]
        assert recovery.suspect is None or running == [recovery.suspect]
