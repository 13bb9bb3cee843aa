"""Taking the KV pool's memory before it is used."""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import Iterator

import psutil
import pytest
from tests.kernels.tiny import memory_checkpoint, tiny_runner

from trunkline.engine import resources
from trunkline.engine.pool_memory import BYTES_AHEAD, IDLE_S, PORTION_BYTES, take_ahead
from trunkline.kernels import Population

LOGGER = logging.getLogger("trunkline.test")


class FakePopulation:
    """A pool of `portions` portions, of which the system refuses the `refused`-th."""

    def __init__(self, portions: int, refused: int | None = None) -> None:
        self.left = portions
        self.refused = refused
        self.taken = 0
        self.written = 0
        self.idle: Iterator[float] = itertools.repeat(math.inf)

    @property
    def num_bytes(self) -> int:
        return self.left * PORTION_BYTES

    @property
    def bytes_ahead(self) -> int:
        return self.taken * PORTION_BYTES - self.written

    @property
    def idle_s(self) -> float:
        return next(self.idle)

    def advance(self, num_bytes: int) -> bool:
        assert num_bytes == PORTION_BYTES
        if self.taken == self.refused:
            raise OSError(12, "Cannot allocate memory")
        self.taken += 1
        return self.taken < self.left


def run(population: Population | None) -> None:
    thread = take_ahead(population, LOGGER)
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()


def test_all_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    population = FakePopulation(20)
    run(population)
    run(None)
    assert (population.taken, caplog.messages) == (20, [])


def test_while_steps_run_little_is_taken_ahead() -> None:
    population = FakePopulation(1000)
    ahead = BYTES_AHEAD // PORTION_BYTES
    taken = []

    def steps() -> Iterator[float]:
        for _ in range(3):  # steps run, and write nothing
            taken.append(population.taken)
            yield 0.01
        population.written += 7 * PORTION_BYTES
        yield 0.01
        taken.append(population.taken)
        yield from itertools.repeat(IDLE_S)

    population.idle = steps()
    run(population)
    assert taken == [ahead, ahead, ahead, ahead + 7]
    assert population.taken == 1000


def test_a_refusal_ends_it_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    population = FakePopulation(256, refused=3)
    run(population)
    assert population.taken == 3
    assert caplog.messages == [
        "The memory of the KV pool (1.00 GiB) is not taken ahead any further, but as it is used: "
        "[Errno 12] Cannot allocate memory"
    ]


def test_it_ends_where_others_need_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = FakePopulation(256)
    free = resources.HOST_RESERVE_BYTES + 5 * PORTION_BYTES
    monkeypatch.setattr(
        resources, "free_host_bytes", lambda: free - population.taken * PORTION_BYTES
    )
    run(population)
    assert population.taken == 6
    assert caplog.messages == [
        "The memory of the KV pool (1.00 GiB) is not taken ahead any further, but as it is used: "
        "only 0.50 GiB are free"
    ]


def test_the_cpu_backend_takes_its_pool() -> None:
    runner = tiny_runner(memory_checkpoint("llama"), backend="cpu", num_pages=20_000)
    population = runner.population()
    assert population is not None
    assert population.num_bytes == runner.memory.pool_bytes > 64 << 20
    before = psutil.Process().memory_info().rss
    run(population)
    grown = psutil.Process().memory_info().rss - before
    assert 0.9 * population.num_bytes < grown < 1.1 * population.num_bytes + (16 << 20)


def test_a_population_does_not_keep_the_pool() -> None:
    runner = tiny_runner(memory_checkpoint("llama"), backend="cpu", num_pages=20_000)
    population = runner.population()
    assert population is not None
    assert population.advance(PORTION_BYTES)
    del runner
    gc.collect()
    assert not population.advance(PORTION_BYTES)


def test_the_reference_has_nothing_to_take() -> None:
    assert tiny_runner(memory_checkpoint("llama"), backend="torch").population() is None
