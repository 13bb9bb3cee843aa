"""The client against a loop with a fake scheduler, through both kinds of channel."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.engine.fakes import FakeCore, FakeEngine, FakeRunner

from trunkline.engine import messages
from trunkline.engine.client import (
    Client,
    ControlFailed,
    EngineDied,
    EventsLost,
    Request,
    RequestRefused,
    Sample,
    merged,
)
from trunkline.engine.loop import MAX_FAILED_STEPS
from trunkline.engine.messages import SamplingParams


def request(rid: str = "a", prompt: list[int] | None = None, tokens: int = 4) -> Request:
    return Request(
        rid=rid,
        prompt_ids=prompt or [100],
        sampling=SamplingParams(max_new_tokens=tokens),
        received_ts=time.time(),
    )


async def connected(engine: FakeEngine) -> Client:
    client = Client(engine.hub.channel())
    await client.start()
    await client.ready()
    return client


def test_a_request_streams_its_tokens_and_text_in_order() -> None:
    async def main() -> None:
        client = await connected(engine)
        stream = client.submit(request())
        await stream.accepted()
        updates = [update async for batch in stream for update in batch]
        sample = stream.samples[0]
        assert sample.output_ids == [101, 102, 103, 104]
        assert sample.text == "<101><102><103><104>"
        assert "".join(update.text for update in updates) == sample.text
        assert [t for update in updates for t in update.token_ids] == sample.output_ids
        assert [update.finished for update in updates] == [False] * (len(updates) - 1) + [True]
        assert sample.finished is not None
        assert sample.finished.reason == "length"
        assert sample.started is not None
        assert sample.first_token_ts is not None
        assert sample.finished_ts is not None
        stream.abort()  # harmless after the end
        await client.close()

    with FakeEngine() as engine:
        asyncio.run(main())


def test_pending_updates_are_merged_per_wake_up() -> None:
    async def main() -> None:
        client = await connected(engine)
        stream = client.submit(request(tokens=6))
        while stream.samples[0].finished is None:
            await asyncio.sleep(0.005)
        (update,) = [u async for batch in stream for u in batch]
        assert (update.token_offset, update.text_offset) == (0, 0)
        assert update.token_ids == [101, 102, 103, 104, 105, 106]
        assert update.text == stream.samples[0].text
        assert update.finished

    with FakeEngine() as engine:
        asyncio.run(main())


def test_a_refused_request_raises_everywhere() -> None:
    async def main() -> None:
        client = await connected(engine)
        for wait in ("accepted", "finished"):
            stream = client.submit(request(prompt=[13]))
            with pytest.raises(RequestRefused, match="full") as info:
                await getattr(stream, wait)()
            assert (info.value.status, info.value.kind) == (503, "queue_full")
        with pytest.raises(RequestRefused):
            await anext(aiter(client.submit(request(prompt=[13]))))

    with FakeEngine() as engine:
        asyncio.run(main())


def test_aborts_by_stream_by_rid_and_all() -> None:
    async def main() -> None:
        client = await connected(engine)
        streams = [client.submit(request(rid=f"r{i}", tokens=10**9)) for i in range(4)]
        for stream in streams:
            await stream.accepted()
        streams[0].abort()
        streams[0].abort()
        await streams[0].finished()
        client.abort("r1")
        await streams[1].finished()
        assert [s.samples[0].finished is None for s in streams] == [False, False, True, True]
        client.abort()
        await asyncio.gather(*(stream.finished() for stream in streams))
        reasons = [s.samples[0].finished.reason for s in streams if s.samples[0].finished]
        assert reasons == ["abort"] * 4

    with FakeEngine(runner=FakeRunner(lambda _: time.sleep(0.001))) as engine:
        asyncio.run(main())


def test_several_streams_merge_as_they_come() -> None:
    async def main() -> None:
        client = await connected(engine)
        streams = [client.submit(request(prompt=[100 * i], tokens=i)) for i in range(1, 5)]
        order = []
        async for stream, updates in merged(streams):
            order += [stream for update in updates if update.finished]
        assert order == streams
        assert [s.samples[0].output_ids[0] for s in streams] == [101, 201, 301, 401]

    with FakeEngine(runner=FakeRunner(lambda _: time.sleep(0.01))) as engine:
        asyncio.run(main())


def test_an_engine_that_fails_ends_every_request_and_control() -> None:
    release = threading.Event()

    def fail(_: object) -> None:
        release.wait(10)
        raise RuntimeError("device lost")

    async def main() -> None:
        client = await connected(engine)
        stream = client.submit(request())
        await stream.accepted()
        asked = asyncio.create_task(client.control("stats"))
        await asyncio.sleep(0.05)
        release.set()
        # Failing steps end their requests one by one; enough of them in a row end the engine.
        await stream.finished()
        assert stream.samples[0].finished is not None
        assert stream.samples[0].finished.reason == "error"
        await asked
        for _ in range(MAX_FAILED_STEPS - 1):
            await client.submit(request()).finished()
        with pytest.raises(EngineDied, match="device lost"):
            await client.submit(request()).finished()
        assert client.status.state == "dead"
        with pytest.raises(EngineDied, match="device lost"):
            await client.control("stats")
        with pytest.raises(EngineDied, match="device lost"):
            await client.ready()

    with FakeEngine(runner=FakeRunner(fail)) as engine:
        asyncio.run(main())
        assert str(engine.errors.get(timeout=5)) == "device lost"


def test_controls_answer_or_fail() -> None:
    async def main() -> None:
        client = await connected(engine)
        assert await client.control("flush_cache") == {"flushed": True}
        assert (await client.control("stats"))["num_waiting"] == 0
        assert await client.control("check_integrity") == {}
        engine.core.log.append("broken")
        with pytest.raises(ControlFailed, match="pages leak"):
            await client.control("check_integrity")
        with pytest.raises(ControlFailed, match="unknown control verb 'fly'"):
            await client.control("fly")

    with FakeEngine() as engine:
        asyncio.run(main())


def test_clients_are_told_apart_and_a_closed_loop_aborts_its_requests() -> None:
    async def leave() -> None:
        client = await connected(engine)
        await client.submit(request(tokens=10**9)).accepted()

    async def main() -> None:
        first, second = await connected(engine), await connected(engine)
        streams = [c.submit(request(prompt=[p])) for c, p in ((first, 200), (second, 300))]
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert [s.samples[0].output_ids[0] for s in streams] == [201, 301]

    with FakeEngine(FakeCore(), FakeRunner(lambda _: time.sleep(0.001))) as engine:
        asyncio.run(leave())
        asyncio.run(main())
        deadline = time.monotonic() + 5
        while engine.core.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine.core.requests


def test_events_apply_once_and_a_gap_is_an_error() -> None:
    def delta(token_offset: int, ids: list[int], text_offset: int, text: str) -> messages.Delta:
        lps = messages.Logprobs([-float(i) for i in ids])
        return messages.Delta(1, 0, token_offset, ids, text_offset, text, lps)

    sample = Sample(0)
    sample._apply(delta(0, [1, 2], 0, "ab"), 1.0)
    update = sample._apply(delta(1, [2, 3], 1, "bé"), 2.0)
    assert (update.token_ids, update.text, update.token_offset) == ([3], "é", 2)
    assert (sample.output_ids, sample.text, sample.first_token_ts) == ([1, 2, 3], "abé", 1.0)
    assert sample.output_logprobs is not None
    assert sample.output_logprobs.values == [-1.0, -2.0, -3.0]
    with pytest.raises(EventsLost, match="events were lost"):
        sample._apply(delta(4, [5], 3, "x"), 3.0)


def test_the_heartbeat_goes_on_when_idle() -> None:
    async def main() -> None:
        client = await connected(engine)
        await asyncio.sleep(1.3)
        age = client.status.heartbeat_age_s
        assert age is not None
        assert age < 1.2

    with FakeEngine() as engine:
        asyncio.run(main())
