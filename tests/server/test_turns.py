"""Several clients come back to an engine that dies: who tries its suspects when."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterator

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from tests.engine.test_client_recovery import finished
from tests.server.fake_engine import FACTS

from trunkline.engine import messages
from trunkline.engine.channel import Changed, Deliver
from trunkline.engine.client import Client, DeadlyRequest, Request, Stream
from trunkline.engine.entries import Begun
from trunkline.engine.messages import EngineStatus
from trunkline.engine.recovery import MAX_DEATHS
from trunkline.server.api_workers import turns
from trunkline.server.api_workers.orders import Told
from trunkline.server.api_workers.turns import Turns

TOKENS = 3
DEADLY = 666


class Engine:
    """Runs some of what it was given in each step, and dies when one of them is deadly."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._status = EngineStatus(state="ready", epoch=1, facts=FACTS, access="suspects")
        self._begun: dict[tuple[int, int], int] = {}  # (client, key) -> life
        self.lines: list[Line] = []
        self.outputs: dict[tuple[int, int], int] = {}  # how many tokens each request has
        self.deadly: set[tuple[int, int]] = set()
        self.changed: Changed = lambda: None

    def status(self) -> EngineStatus:
        return self._status

    def open_to_all(self, epoch: int) -> None:
        if (self._status.access, self._status.epoch) == ("suspects", epoch):
            self._be(msgspec.structs.replace(self._status, access="shared"))

    def _be(self, status: EngineStatus) -> None:
        self._status = status
        self.lines[0].tell(status)
        self.changed()

    def die(self) -> None:
        self.outputs.clear()
        self.deadly.clear()
        self._be(EngineStatus(state="starting", epoch=self._status.epoch))

    def restart(self) -> None:
        epoch = self._status.epoch + 1
        self._be(EngineStatus(state="ready", epoch=epoch, facts=FACTS, access="suspects"))

    def begun(self, client: int, epoch: int) -> Begun:
        lives = [life for (other, _), life in self._begun.items() if other != client]
        keys = frozenset(key for one, key in self._begun if one == client)
        return Begun(keys, others=epoch in lives)

    def step(self) -> None:
        running = self._random.sample(
            list(self.outputs), self._random.randint(0, len(self.outputs))
        )
        self._begun |= dict.fromkeys(running, self._status.epoch)
        if self.deadly.intersection(running):
            self.die()
            return
        for where in running:
            self._gain(*where)

    def _gain(self, client: int, key: int) -> None:
        count = self.outputs[client, key]
        event: messages.Event
        if count == TOKENS:
            event = self.end(client, key, "length")
        else:
            event = messages.Delta(key, 0, count, [count], count, "x")
            self.outputs[client, key] += 1
        self.lines[client].deliver(self._status.epoch, msgspec.msgpack.encode([event]))

    def end(self, client: int, key: int, reason: str) -> messages.Finished:
        self.deadly.discard((client, key))
        return finished(key, 0, self.outputs.pop((client, key)), reason)


class Line:
    """The channel of one client."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._number = number
        self._status = engine.status()

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        self.deliver, self._changed = deliver, changed

    async def close(self) -> None: ...

    def tell(self, status: EngineStatus) -> None:
        self._status = status
        self._changed()

    def status(self) -> EngineStatus:
        return self._status

    def entered(self, epoch: int) -> Begun:
        return self._engine.begun(self._number, epoch)

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        now = self._engine.status()
        if (now.state, now.epoch) != ("ready", epoch):
            return
        if kind == messages.ABORT:
            key = msgspec.msgpack.decode(payload, type=messages.Abort).key
            if key is not None and (self._number, key) in self._engine.outputs:
                blob = msgspec.msgpack.encode([self._engine.end(self._number, key, "abort")])
                asyncio.get_running_loop().call_soon(self.deliver, epoch, blob)
            return
        submit = msgspec.msgpack.decode(payload, type=messages.Submit)
        assert now.access == "shared" or not self._engine.outputs, "a suspect is tried alone"
        resumed = submit.resume[0].output_ids if submit.resume else []
        self._engine.outputs[self._number, submit.key] = len(resumed)
        if submit.prompt == [DEADLY]:
            self._engine.deadly.add((self._number, submit.key))


class Member:
    """An API worker without a process; while one hangs, orders wait."""

    def __init__(self, line: Line, client: Client) -> None:
        self.settled = {0: 0}
        self.is_alive = True
        self.hangs = False
        self._orders: list[Told] = []
        self._line = line
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    def send(self, order: Told) -> None:
        if self.hangs:
            self._orders.append(order)
        else:
            self._take(order)

    def wake(self) -> None:
        self.hangs = False
        for order in self._orders:
            self._take(order)

    @property
    def heard_at(self) -> float:
        return 0.0 if self.hangs else time.monotonic()

    def _take(self, order: Told) -> None:
        self._line.tell(order.status)
        if order.status.access == "suspects":
            self._tasks.append(asyncio.create_task(self._settle(order.status.epoch)))

    async def _settle(self, epoch: int) -> None:
        while self._client.is_testing and self._line.status().epoch == epoch:
            await asyncio.sleep(0)
        self.settled[0] = epoch


class Scene:
    """Some clients at an engine; the first supervises it."""

    def __init__(self, count: int, seed: int) -> None:
        self.engine = Engine(seed)
        self.lines = [Line(self.engine, number) for number in range(count)]
        self.engine.lines = self.lines
        self.clients = [Client(line) for line in self.lines]
        pairs = zip(self.lines[1:], self.clients[1:], strict=True)
        self.members = [Member(line, client) for line, client in pairs]
        self.turns = Turns([self.engine], self.clients[0], lambda: self.members)
        self.tasks: list[asyncio.Task[None]] = []
        self.engine.changed = self._changed

    async def begin(self) -> None:
        for client in self.clients:
            await client.start()
        await self.turns.take(0)
        assert self.engine.status().access == "shared"

    def _changed(self) -> None:
        status = self.engine.status()
        if status.access == "suspects":
            self.tasks.append(asyncio.create_task(self.turns.take(0)))
        else:
            for member in self.members:
                member.send(Told(rank=0, status=status))

    async def play(self, streams: list[Stream]) -> list[BaseException | None]:
        """Step until all have ended; what each failed of."""
        ends = asyncio.gather(*(one.finished() for one in streams), return_exceptions=True)
        while not ends.done():
            if self.engine.status().state == "ready":
                self.engine.step()
            else:
                self.engine.restart()
            await asyncio.sleep(0)
        return ends.result()


def request(rid: str, prompt: int) -> Request:
    sampling = messages.SamplingParams(max_new_tokens=TOKENS)
    return Request(rid=rid, prompt_ids=[prompt], sampling=sampling, received_ts=time.time())


async def restarted(suspects: list[bool], hanging: int | None = None) -> tuple[Scene, list[Stream]]:
    """An engine that is there again; each client had a request, of which some are suspects."""
    scene = Scene(len(suspects), seed=0)
    await scene.begin()
    streams = [client.submit(request(f"r{n}", 1)) for n, client in enumerate(scene.clients)]
    for stream, is_suspect in zip(streams, suspects, strict=True):
        stream.deaths = MAX_DEATHS if is_suspect else 0
    if hanging is not None:
        scene.members[hanging].hangs = True
    scene.engine.die()
    scene.engine.restart()
    return scene, streams


def run(scene: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 30))


@pytest.fixture(autouse=True, scope="module")
def no_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "_POLL_S", 0)
        yield


@given(st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=4), st.integers(0, 2**32))
@settings(deadline=None)
def test_only_what_kills_the_engine_is_given_up(brought: list[list[bool]], seed: int) -> None:
    """Each client brings some requests, of which some kill the engine, in any order of steps."""

    async def main() -> None:
        scene = Scene(len(brought), seed)
        await scene.begin()
        deadly = [is_deadly for some in brought for is_deadly in some]
        streams = [
            client.submit(request(f"r{number}_{n}", DEADLY if is_deadly else 1))
            for number, (client, some) in enumerate(zip(scene.clients, brought, strict=True))
            for n, is_deadly in enumerate(some)
        ]
        failures = await scene.play(streams)
        assert [type(one) for one in failures] == [
            DeadlyRequest if is_deadly else type(None) for is_deadly in deadly
        ]
        outputs = [one.samples[0].output_ids for one in streams]
        assert outputs == [[] if is_deadly else list(range(TOKENS)) for is_deadly in deadly]

    run(main())


def test_a_process_without_suspects_waits_for_those_of_others() -> None:
    async def main() -> None:
        scene, (ours, theirs) = await restarted(suspects=[False, True])
        new = scene.clients[0].submit(request("new", 1))
        while not scene.engine.outputs:
            await asyncio.sleep(0)
        assert list(scene.engine.outputs) == [(1, theirs.key)]
        assert scene.clients[0].held == [ours, new]
        assert await scene.play([ours, theirs, new]) == [None] * 3

    run(main())


def test_a_process_that_hangs_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)

    async def main() -> None:
        scene, streams = await restarted(suspects=[False, True, False], hanging=0)
        assert await scene.play([streams[0], streams[2]]) == [None, None]
        deadly = scene.clients[0].submit(request("deadly", DEADLY))
        scene.members[0].wake()  # its suspect is not alone
        innocent, guilty = await scene.play([streams[1], deadly])
        assert innocent is None
        assert isinstance(guilty, DeadlyRequest)

    run(main())
    assert "has not answered" in caplog.text


def test_a_long_trial_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)

    async def main() -> None:
        scene, (ours, theirs) = await restarted(suspects=[False, True])
        await asyncio.sleep(0.2)
        assert scene.engine.status().access == "suspects"
        assert await scene.play([ours, theirs]) == [None, None]

    run(main())


def test_nobody_is_tried_beside_the_suspect_of_a_process_that_died() -> None:
    async def main() -> None:
        scene, streams = await restarted(suspects=[False, True, True])
        while not scene.engine.outputs:
            await asyncio.sleep(0)
        assert list(scene.engine.outputs) == [(1, streams[1].key)]
        scene.members[0].is_alive = False
        while scene.engine.status().access == "suspects":
            await asyncio.sleep(0)
        assert not scene.clients[2].is_testing
        assert await scene.play([streams[0], streams[2]]) == [None, None]

    run(main())
