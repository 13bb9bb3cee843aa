"""Several engines behind one client: choice, pinning, aborts, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.test_client import request
from tests.engine.test_process import collected
from tests.server.fake_engine import EOS, FakeEngine

from trunkline import Engine
from trunkline.engine.client import DeadlyRequest, EngineDied, RequestRefused, Stream
from trunkline.engine.config import EngineConfig, ModelOptions, ParallelOptions, SchedulerOptions
from trunkline.engine.fleet import METHODS, Fleet
from trunkline.engine.process import EngineProcess
from trunkline.engine.resources import SettingError
from trunkline.engine.shares import Share, allowed_cores, equal_shares, replica_config

ROOT = Path(__file__).parents[2]


def loads(fleet: Fleet) -> list[tuple[int, int]]:
    """What the router reckons with: requests and prompt tokens of each rank."""
    assert fleet._router is not None
    return [(one["in_flight"], one["prefill_tokens"]) for one in fleet._router.loads()]


async def opened(engines: list[FakeEngine], method: str = "cache_aware") -> Fleet:
    fleet = Fleet(engines, method)
    await fleet.start()
    await fleet.ready()
    return fleet


def prompt(group: int, number: int) -> list[int]:
    return [group + 1] * 64 + [number % 250] * 8


async def run_all(fleet: Fleet, prompts: list[list[int]]) -> list[Stream]:
    streams = [
        fleet.submit(request(rid=f"r{number}", prompt=one)) for number, one in enumerate(prompts)
    ]
    await asyncio.gather(*(stream.finished() for stream in streams))
    return streams


@pytest.mark.parametrize("method", METHODS)
def test_every_method_shares_the_work_and_its_account_returns_to_zero(method: str) -> None:
    async def main() -> None:
        fleet = await opened([FakeEngine(), FakeEngine(), FakeEngine()], method)
        streams = await run_all(fleet, [prompt(n, n) for n in range(60)])
        counts = [sum(stream.dp_rank == rank for stream in streams) for rank in range(3)]
        assert min(counts) >= 12
        assert loads(fleet) == [(0, 0)] * 3
        assert not fleet._homes
        await fleet.close()

    asyncio.run(main())


def test_prefixes_stay_together_and_round_robin_scatters_them() -> None:
    async def main(method: str) -> int:
        fleet = await opened([FakeEngine(), FakeEngine()], method)
        homes: dict[int, set[int | None]] = {}
        for number in range(60):
            [stream] = await run_all(fleet, [prompt(number * 7 % 15, number)])
            homes.setdefault(number * 7 % 15, set()).add(stream.dp_rank)
        used = {rank for ranks in homes.values() for rank in ranks}
        assert used == {0, 1}
        await fleet.close()
        return sum(len(ranks) == 1 for ranks in homes.values())

    assert asyncio.run(main("cache_aware")) == 15
    assert asyncio.run(main("round_robin")) < 15


def test_a_pinned_request_runs_where_it_says() -> None:
    async def main() -> None:
        engines = [FakeEngine(), FakeEngine()]
        fleet = await opened(engines)
        for rank in (1, 0, 1, 1):
            stream = fleet.submit(replace(request(prompt=prompt(0, 0)), dp_rank=rank))
            await stream.finished()
            assert stream.dp_rank == rank
        assert [len(engine.submitted) for engine in engines] == [1, 3]
        engines[1].kill()
        with pytest.raises(EngineDied, match="SIGKILL"):
            await fleet.submit(replace(request(), dp_rank=1)).accepted()
        assert fleet.status.state == "ready"
        assert "rank 1: the engine process was killed" in (fleet.status.error or "")
        await fleet.close()

    asyncio.run(main())


def test_an_id_in_flight_is_refused_at_whichever_rank_it_is() -> None:
    async def main() -> None:
        fleet = await opened([FakeEngine(hold=True), FakeEngine(hold=True)], "round_robin")
        first = fleet.submit(request(rid="same"))
        await first.accepted()
        for _ in range(3):
            with pytest.raises(RequestRefused, match="Duplicate request ID"):
                await fleet.submit(request(rid="same")).accepted()
        first.abort()
        await first.finished()
        again = fleet.submit(request(rid="same"))
        await again.accepted()
        await fleet.close()
        assert loads(fleet) == [(0, 0)] * 2

    asyncio.run(main())


def test_aborts_reach_every_rank() -> None:
    async def main() -> None:
        engines = [FakeEngine(hold=True), FakeEngine(hold=True)]
        fleet = await opened(engines, "round_robin")
        streams = [fleet.submit(request(rid=f"r{number}")) for number in range(6)]
        await asyncio.gather(*(stream.accepted() for stream in streams))
        fleet.abort("r3")
        streams[4].abort()
        for number in (3, 4):
            await streams[number].finished()
        assert sorted(engines[0].aborted + engines[1].aborted) == ["r3", "r4"]
        fleet.abort()
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert loads(fleet) == [(0, 0)] * 2
        await fleet.close()

    asyncio.run(main())


def test_a_flush_empties_idle_ranks_and_tells_of_busy_ones() -> None:
    async def main() -> None:
        engines = [FakeEngine(hold=True), FakeEngine()]
        fleet = await opened(engines)
        stream = fleet.submit(replace(request(), dp_rank=0))
        await stream.accepted()
        assert not await fleet.flush_cache()
        stream.abort()
        await stream.finished()
        assert await fleet.flush_cache()
        engines[0].kill()
        assert await fleet.flush_cache()
        engines[1].kill()
        with pytest.raises(EngineDied, match=r"rank 0: .*; rank 1: "):
            await fleet.flush_cache()
        await fleet.close()

    asyncio.run(main())


def test_the_first_rank_that_is_back_takes_what_all_had() -> None:
    async def main() -> None:
        engines = [FakeEngine(delay_s=0.005), FakeEngine(delay_s=0.005)]
        fleet = await opened(engines, "round_robin")
        streams = [fleet.submit(request(rid=f"r{n}", tokens=30)) for n in range(4)]
        for stream in streams:
            await anext(aiter(stream))
        engines[1].kill()
        assert [stream.dp_rank for stream in streams] == [0] * 4
        engines[0].kill()
        assert fleet.status.state == "starting"
        waiting = asyncio.create_task(fleet.ready())
        await asyncio.sleep(0)
        assert not waiting.done()
        engines[1].restart()
        await waiting
        # Two have moved before and wait for their rank; the others go on at once.
        assert sorted(stream.dp_rank or 0 for stream in streams) == [0, 0, 1, 1]
        engines[0].restart()
        await asyncio.gather(*(stream.finished() for stream in streams))
        alone = fleet.submit(request(rid="alone", tokens=30))
        await alone.finished()
        for stream in streams:
            assert stream.samples[0].output_ids == alone.samples[0].output_ids
            assert stream.samples[0].text == alone.samples[0].text
        assert loads(fleet) == [(0, 0)] * 2
        await fleet.close()

    asyncio.run(main())


async def disturb(engines: list[FakeEngine], numbers: random.Random) -> None:
    """Kill and restart at random; in the end all are ready."""
    for _ in range(numbers.randrange(2, 12)):
        await asyncio.sleep(numbers.random() * 0.02)
        engine = numbers.choice(engines)
        if engine.status().state == "ready":
            engine.kill()
        else:
            engine.restart()
    for engine in engines:
        if engine.status().state != "ready":
            engine.restart()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_every_request_ends_once_with_its_own_tokens(seed: int) -> None:
    numbers = random.Random(seed)
    method = numbers.choice(sorted(METHODS))

    async def main() -> None:
        engines = [FakeEngine(delay_s=0.002) for _ in range(3)]
        fleet = await opened(engines, method)
        disturbance = asyncio.create_task(disturb(engines, numbers))
        streams = []
        for number in range(40):
            pin = numbers.choice([None, None, None, 0, 1, 2])
            one = replace(request(f"r{number}", prompt(number % 5, number), 50), dp_rank=pin)
            streams.append(fleet.submit(one))
            await asyncio.sleep(numbers.random() * 0.004)
        await disturbance
        expected = [*b"Hello world", EOS]
        for stream in streams:
            if not stream.dispatched_ts:  # no engine was ready, or not the one that it named
                with pytest.raises(EngineDied):
                    await stream.finished()
                continue
            try:
                updates = [update async for batch in stream for update in batch]
            except DeadlyRequest:  # the third engine died under it, and it was alone there
                continue
            assert [token for update in updates for token in update.token_ids] == expected
            assert "".join(update.text for update in updates) == "Hello world"
            assert stream.moves <= 1
            pinned = stream.request.dp_rank
            assert pinned in (None, stream.dp_rank)
        assert any(stream.samples[0].finished is not None for stream in streams)
        assert loads(fleet) == [(0, 0)] * 3
        assert not fleet._homes
        await fleet.close()

    asyncio.run(main())


def test_what_is_aborted_after_it_moved_ends() -> None:
    async def main() -> None:
        engines = [FakeEngine(delay_s=0.005), FakeEngine(delay_s=0.005)]
        fleet = await opened(engines)
        stream = fleet.submit(request(tokens=400))
        await anext(aiter(stream))
        engines[stream.dp_rank or 0].kill()
        stream.abort()
        await stream.finished()
        assert stream.samples[0].finished is not None
        assert stream.samples[0].finished.reason == "abort"
        assert loads(fleet) == [(0, 0)] * 2
        await fleet.close()

    asyncio.run(main())


def test_a_fleet_whose_rank_cannot_start_does_not_start() -> None:
    async def main() -> None:
        engines = [FakeEngine(), FakeEngine()]
        fleet = Fleet(engines)
        await fleet.start()
        engines[1].set_status("dead", "tensor lm_head is missing")
        assert fleet.status.state == "dead"
        with pytest.raises(EngineDied, match="lm_head"):
            await fleet.ready()
        with pytest.raises(EngineDied):
            await fleet.submit(request()).accepted()
        await fleet.close()

    asyncio.run(main())


def test_facts_of_ready_ranks_add_up() -> None:
    async def main() -> None:
        engines = [FakeEngine(), FakeEngine()]
        fleet = await opened(engines)
        for _ in range(2):
            facts = fleet.status.facts
            assert facts is not None
            assert (facts.max_total_tokens, facts.context_length) == (8192, 512)
            engines[0].kill()
            assert fleet.status.facts is not None
            assert fleet.status.facts.max_total_tokens == 4096
            engines[0].restart()
        await fleet.close()

    asyncio.run(main())


async def processes(model: str, count: int) -> tuple[Fleet, list[EngineProcess]]:
    config = EngineConfig(model=ModelOptions(model_path=model))
    children = [
        EngineProcess(config, "tests.engine.fake_child", Share(rank=rank, count=count))
        for rank in range(count)
    ]
    fleet = Fleet(children, "round_robin")
    await fleet.start()
    await fleet.ready()
    return fleet, children


def test_streams_of_a_killed_rank_go_on_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def main() -> None:
        fleet, children = await processes("slow", 2)
        streams = [
            fleet.submit(request(rid=f"r{n}", prompt=[1000 * n], tokens=60)) for n in range(1, 5)
        ]
        pinned = fleet.submit(replace(request("pinned", [9000], tokens=60), dp_rank=0))
        rest = [asyncio.create_task(collected(stream)) for stream in (*streams, pinned)]
        while min(len(stream.samples[0].output_ids) for stream in (*streams, pinned)) < 10:
            await asyncio.sleep(0.005)
        assert [stream.dp_rank for stream in streams] == [0, 1, 0, 1]
        assert children[0].pid is not None
        os.kill(children[0].pid, signal.SIGKILL)
        for number, stream, task in zip((1, 2, 3, 4), streams, rest, strict=False):
            expected = list(range(1000 * number + 1, 1000 * number + 61))
            assert await task == (expected, "".join(f"<{token}>" for token in expected))
            assert (stream.dp_rank, stream.moves) == (1, number % 2)
        await fleet.ready(0)
        assert (await rest[-1])[0] == list(range(9001, 9061))
        assert (pinned.dp_rank, pinned.moves) == (0, 0)
        assert [child.status().epoch for child in children] == [2, 1]
        assert loads(fleet) == [(0, 0)] * 2
        await fleet.close()

    asyncio.run(main())


def test_a_deadly_request_stops_two_ranks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("trunkline.engine.process.BACKOFF_S", (0.0,))

    async def main() -> None:
        fleet, children = await processes("deadly", 3)
        streams = [
            fleet.submit(request(rid=f"r{n}", prompt=[1000 * n], tokens=300)) for n in range(1, 7)
        ]
        for stream in streams:
            await anext(aiter(stream))
        with pytest.raises(EngineDied, match="each time"):
            await fleet.submit(request("deadly", [666], tokens=300)).finished()
        for number, stream in enumerate(streams, 1):
            await stream.finished()
            expected = list(range(1000 * number + 1, 1000 * number + 301))
            assert stream.samples[0].output_ids == expected
        await asyncio.gather(*(fleet.ready(rank) for rank in range(3)))
        assert sorted(child.status().epoch for child in children) == [1, 2, 3]
        assert loads(fleet) == [(0, 0)] * 3
        await fleet.close()

    asyncio.run(main())


def test_shares_divide_memory_cores_and_running_requests(tmp_path: Path) -> None:
    assert equal_shares(1) == [Share()]
    shares = equal_shares(3)
    assert [share.rank for share in shares] == [0, 1, 2]
    assert len({(share.host_bytes, share.threads, share.count) for share in shares}) == 1
    assert shares[0].threads == max(1, allowed_cores() // 3)
    quota = tmp_path / "cpu.max"
    for text, cores in (("150000 100000", 1), ("max 100000", len(os.sched_getaffinity(0)))):
        quota.write_text(text + "\n")
        assert allowed_cores(quota) == cores
    config = EngineConfig(
        scheduler=SchedulerOptions(max_running_requests=7), parallel=ParallelOptions(dp_size=2)
    )
    assert replica_config(config).scheduler.max_running_requests == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"dp_size": 2}, "engine-serve --dp-size"), ({"load_balance_method": "round_robin"}, "leave")],
)
def test_an_engine_in_this_process_is_one_engine(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Engine(**settings)
