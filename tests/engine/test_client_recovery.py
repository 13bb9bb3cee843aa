"""The client against engines that die, step by step: nothing is lost, doubled or left running."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from tests.engine.fakes import FACTS

from trunkline.engine import messages
from trunkline.engine.channel import Changed, Deliver
from trunkline.engine.client import (
    Client,
    DeadlyRequest,
    EngineDied,
    RequestRefused,
    Stream,
)
from trunkline.engine.entries import Begun
from trunkline.engine.messages import EngineStatus
from trunkline.engine.recovery import MAX_DEATHS
from trunkline.engine.stream import Request

TOKENS = 4  # of every sample


class SteppedEngine:
    """A channel with an engine behind it that does something only when a test says so.

    Every sample of every request gains a token per step: its number, counted from 0. Requests of
    `refused` ids are refused.
    """

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.known_entered: Begun | None = None
        self.requests: dict[int, messages.Submit] = {}
        self.outputs: dict[tuple[int, int], int] = {}  # of the samples that have not ended
        self._aborted: set[tuple[int, int]] = set()  # of them, to end at the next step
        self._events: list[messages.Event] = []
        self._status = EngineStatus(state="ready", epoch=1, facts=FACTS)

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        self._deliver, self._changed = deliver, changed

    async def close(self) -> None: ...

    def status(self) -> EngineStatus:
        return self._status

    def entered(self, epoch: int) -> Begun | None:
        assert epoch == self._status.epoch, "it is asked of the life that has ended"
        return self.known_entered

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        if epoch != self._status.epoch or self._status.state != "ready":
            return
        if kind == messages.ABORT:
            self._abort(msgspec.msgpack.decode(payload, type=messages.Abort))
            return
        submit = msgspec.msgpack.decode(payload, type=messages.Submit)
        assert submit.rid not in [one.rid for one in self.requests.values()], "it runs already"
        assert len(submit.resume) in (0, submit.n)
        if submit.rid in self.refused:
            self._events.append(messages.Refused(submit.key, 400, "invalid", "no", None))
            return
        self.requests[submit.key] = submit
        for index in range(submit.n):
            resumed = submit.resume[index].output_ids if submit.resume else []
            assert resumed == list(range(len(resumed)))
            self.outputs[submit.key, index] = len(resumed)
        self._events.append(messages.Accepted(submit.key))

    def step(self) -> None:
        for key, index in sorted(self._aborted):
            self._finish(key, index, "abort")
        self._aborted.clear()
        for (key, index), count in list(self.outputs.items()):
            if count >= TOKENS:
                self._finish(key, index, "length")
            else:
                delta = messages.Delta(key, index, count, [count], count, "x")
                self._events.append(delta)
                self.outputs[key, index] = count + 1
        events, self._events = self._events, []
        self._deliver(self._status.epoch, msgspec.msgpack.encode(events))

    def _abort(self, abort: messages.Abort) -> None:
        for key, index in self.outputs:
            rid = self.requests[key].rid
            if abort.all or abort.key == key or abort.rid in (rid, f"{rid}_{index}"):
                self._aborted.add((key, index))

    def _finish(self, key: int, index: int, reason: str) -> None:
        count = self.outputs.pop((key, index))
        if all(one != key for one, _ in self.outputs):
            del self.requests[key]
        self._events.append(finished(key, index, count, reason))

    def die(self) -> None:
        for kept in (self.requests, self.outputs, self._aborted, self._events):
            kept.clear()
        self._status = EngineStatus(state="starting", epoch=self._status.epoch, error="killed")
        self._changed()

    def restart(self) -> None:
        self._status = EngineStatus(state="ready", epoch=self._status.epoch + 1, facts=FACTS)
        self._changed()


def finished(key: int, sample: int, count: int, reason: str) -> messages.Finished:
    """The last event of a sample of `count` tokens, each of one character, which were told."""
    return messages.Finished(
        key=key,
        sample=sample,
        token_offset=count,
        token_ids=[],
        text_offset=count,
        text="",
        logprobs=None,
        prompt_logprobs=None,
        reason=reason,
        matched=None,
        message=None,
        status=0,
        completion_tokens=count,
        num_retractions=0,
        queue_time=0.0,
    )


def request(rid: str, n: int = 1) -> Request:
    sampling = messages.SamplingParams(max_new_tokens=TOKENS)
    return Request(rid=rid, prompt_ids=[1], sampling=sampling, n=n, received_ts=time.time())


async def connected() -> tuple[Client, SteppedEngine]:
    engine = SteppedEngine()
    client = Client(engine)
    await client.start()
    return client, engine


def reasons(stream: Stream) -> list[str | None]:
    return [sample.finished.reason if sample.finished else None for sample in stream.samples]


async def suspected(client: Client, engine: SteppedEngine) -> tuple[Stream, Stream]:
    """A request of two samples that runs alone, and one that waits for the outcome."""
    first, second = client.submit(request("a", n=2)), client.submit(request("b"))
    for _ in range(MAX_DEATHS):
        engine.die()
        engine.restart()
    assert [one.rid for one in engine.requests.values()] == ["a"]
    return first, second


@pytest.mark.parametrize("rid", [None, "a", "a_0"])
def test_an_abort_holds_while_the_suspect_is_taken_back(rid: str | None) -> None:
    async def main() -> None:
        client, engine = await connected()
        suspect, other = await suspected(client, engine)
        engine.step()  # it gains a token, and is taken back
        if rid is None:
            suspect.abort()
        else:
            client.abort(rid)
        for _ in range(2 * TOKENS + 3):
            engine.step()
        assert reasons(suspect) == (["abort", "length"] if rid == "a_0" else ["abort", "abort"])
        assert reasons(other) == ["length"]
        assert (engine.requests, list(client.in_flight)) == ({}, [])

    asyncio.run(main())


@pytest.mark.parametrize("rid", ["a", "a_0"])
def test_an_abort_holds_where_the_engine_dies_before_it_is_done(rid: str) -> None:
    async def main() -> None:
        client, engine = await connected()
        stream = client.submit(request("a", n=2))
        engine.step()
        client.abort(rid)
        engine.die()
        engine.restart()
        for _ in range(TOKENS + 2):
            engine.step()
        assert reasons(stream) == (["abort", "length"] if rid == "a_0" else ["abort", "abort"])
        assert engine.requests == {}

    asyncio.run(main())


def test_one_sample_of_a_request_that_waits_can_be_aborted() -> None:
    async def main() -> None:
        client, engine = await connected()
        stream = client.submit(request("a", n=2))
        engine.die()
        client.abort("a_1")
        assert reasons(stream) == [None, "abort"]
        client.abort("a_0")
        assert reasons(stream) == ["abort", "abort"]
        engine.restart()
        assert engine.requests == {}

    asyncio.run(main())


def test_a_request_that_no_engine_had_counts_in_the_queue_as_a_new_one() -> None:
    async def main() -> None:
        client, engine = await connected()
        await suspected(client, engine)
        client.submit(request("c"))
        assert [stream.request.rid for stream in client.in_flight] == ["a", "b", "c"]
        for _ in range(4):  # both suspects gain a token, one after the other
            engine.step()
        resumes = {one.rid: len(one.resume) for one in engine.requests.values()}
        assert resumes == {"a": 2, "b": 1, "c": 0}

    asyncio.run(main())


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_refusal_after_a_death_ends_that_request_alone(is_suspect: bool) -> None:
    async def main() -> None:
        client, engine = await connected()
        stream, other = client.submit(request("a")), client.submit(request("b"))
        if is_suspect:
            engine.die()
            engine.restart()
        else:
            engine.step()
        engine.refused.add("a")
        engine.die()
        engine.restart()
        for _ in range(2 * TOKENS + 4):
            engine.step()
        with pytest.raises(RequestRefused, match="no"):
            await stream.finished()
        assert reasons(other) == ["length"]
        assert list(client.in_flight) == []

    asyncio.run(main())


def test_what_waits_for_an_engine_fails_when_the_client_is_closed() -> None:
    async def main() -> None:
        client, engine = await connected()
        streams = [*await suspected(client, engine), client.submit(request("c"))]
        await client.close("we are closing")
        for stream in streams:
            with pytest.raises(EngineDied, match="we are closing"):
                await stream.finished()
        assert list(client.in_flight) == []

    asyncio.run(main())


def test_a_grammar_goes_to_every_engine_of_its_request() -> None:
    async def main() -> None:
        client, engine = await connected()
        grammar = messages.GrammarSpec("regex", "0*", [5])
        client.submit(replace(request("a"), grammar=grammar))
        engine.step()
        engine.die()
        engine.restart()
        [submit] = engine.requests.values()
        assert (submit.grammar, submit.must_prepare) == (grammar, True)
        assert submit.resume == [messages.Resume([0], 1)]

    asyncio.run(main())


OPERATIONS = st.one_of(
    st.sampled_from(["submit", "step", "step", "die", "restart", "abort all"]),
    st.tuples(st.sampled_from(["abort", "abort rid", "abort sample"]), st.integers(0, 5)),
)


@given(st.lists(OPERATIONS, max_size=40))
def test_every_request_ends_once_and_none_runs_unasked(script: list[str | tuple[str, int]]) -> None:
    async def main() -> None:
        client, engine = await connected()
        streams: list[Stream] = []
        aborted: set[tuple[str, int]] = set()
        for operation in script:
            _play(client, engine, streams, operation)
            aborted |= _aborts(streams, operation)
            running = {key for key, _ in engine.outputs}
            assert running <= {stream.key for stream in client.in_flight} or engine._events
        if client.status.state != "ready":
            engine.restart()
        for _ in range((TOKENS + 6) * (len(streams) + 1)):
            engine.step()
        assert (engine.requests, list(client.in_flight)) == ({}, [])
        for stream in streams:
            for sample in stream.samples:
                _check_end(stream, sample.index, aborted)

    asyncio.run(main())


def _play(
    client: Client,
    engine: SteppedEngine,
    streams: list[Stream],
    operation: str | tuple[str, int],
) -> None:
    is_ready = client.status.state == "ready"
    match operation:
        case "submit" if is_ready:
            streams.append(client.submit(request(f"r{len(streams)}", n=1 + len(streams) % 3)))
        case "step" if is_ready:
            engine.step()
        case "die" if is_ready:
            engine.die()
        case "restart" if not is_ready:
            engine.restart()
        case "abort all":
            client.abort()
        case ("abort", index) if index < len(streams):
            streams[index].abort()
        case ("abort rid", index) if index < len(streams):
            client.abort(streams[index].request.rid)
        case ("abort sample", index) if index < len(streams):
            client.abort(f"{streams[index].request.rid}_0")


def _aborts(streams: list[Stream], operation: str | tuple[str, int]) -> set[tuple[str, int]]:
    """The samples that an operation means to end."""
    if operation == "abort all":
        met = streams
    elif isinstance(operation, tuple):
        met = streams[operation[1] : operation[1] + 1]
    else:
        met = []
    only_first = operation[0] == "abort sample"
    return {(s.request.rid, i) for s in met for i in range(1 if only_first else s.request.n)}


def _check_end(stream: Stream, index: int, aborted: set[tuple[str, int]]) -> None:
    sample = stream.samples[index]
    if sample.finished is None:  # its engines died each time that it ran alone
        assert isinstance(stream._error, DeadlyRequest)
        return
    assert sample.output_ids == list(range(len(sample.output_ids)))
    assert sample.text == "x" * len(sample.output_ids)
    if sample.finished.reason == "length":
        assert len(sample.output_ids) == TOKENS
    else:
        assert (sample.finished.reason, (stream.request.rid, index) in aborted) == ("abort", True)
