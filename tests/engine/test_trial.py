"""How much memory the largest step takes: what is run, and the arithmetic of what is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.kernels.tiny import decoder_config

from trunkline.engine import launch, resources, sizes
from trunkline.engine.config import CacheOptions
from trunkline.engine.launch import build, engine_config
from trunkline.engine.resources import GIB, Memory, SettingError
from trunkline.engine.runner import Runner
from trunkline.engine.trial import MAX_ROWS, Taken, Trial, measure, measured_memory
from trunkline.plan import Plan

DEVICE = torch.device("cuda")
MODEL = decoder_config("llama", vocab_size=100_000)


@dataclass
class FakeDevice:
    """Memory as torch's caching allocator accounts for it."""

    total: int = 80 * GIB
    outside: int = 0  # context, kernels, other processes
    allocated: int = 0
    reserved: int = 0
    peak: int = 0

    def reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak = max(self.peak, self.reserved)

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.reserved

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
        readings: dict[str, Callable[..., Any]] = {
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset_peak,
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_reserved": lambda device: self.peak,
            "mem_get_info": lambda device: (
                self.total - self.outside - self.reserved,
                self.total,
            ),
        }
        for name, reading in readings.items():
            monkeypatch.setattr(torch.cuda, name, reading)
        return self


def test_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(outside=GIB, allocated=20 * GIB, reserved=23 * GIB, peak=40 * GIB)
    fake.install(monkeypatch)
    free = fake.total - fake.outside  # before the model was loaded

    def step() -> None:
        fake.reserve(5 * GIB)  # on top of what is allocated: the cache was emptied
        fake.outside += GIB // 2  # libraries that it loads
        fake.reserved -= GIB

    taken = measure(DEVICE, free, 2 * GIB, step)
    assert taken == Taken(weights=18 * GIB, step=5 * GIB, other=GIB // 2)


def test_memory_that_others_free_meanwhile_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(outside=10 * GIB).install(monkeypatch)
    free = fake.total - fake.outside

    def step() -> None:
        fake.outside = 0

    assert measure(DEVICE, free, 0, step).other == 0


def test_a_step_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(allocated=20 * GIB).install(monkeypatch)

    def step() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(SettingError, match=r"20\.0 GiB are taken.*lower max_prefill_tokens"):
        measure(DEVICE, 70 * GIB, 0, step)


def test_the_pool_gets_what_is_left() -> None:
    estimate = Memory(
        free=80 * GIB, weights=10 * GIB, per_token=1000, on_host=False, per_step=60 * GIB
    )
    trial = Trial(num_rows=100, width=10, num_pages=101)
    taken = Taken(weights=16 * GIB, step=3 * GIB, other=GIB)
    memory = measured_memory(taken, trial, estimate, MODEL, 1100, 2 * GIB)
    beyond = 1000 * resources.row_bytes(MODEL) + resources.score_bytes(MODEL)
    assert memory == replace(estimate, weights=16 * GIB, per_step=3 * GIB + GIB + beyond + 2 * GIB)
    # A share of 0.95 would leave less than a step takes.
    options = CacheOptions(mem_fraction_static=0.95, page_size=1)
    left = (80 - 16) * GIB - memory.per_step
    assert resources.pool_tokens(options, memory, 10**6, 10**6) == left // 1000
    small = replace(options, mem_fraction_static=0.5)
    assert resources.pool_tokens(small, memory, 10**6, 10**6) == (40 - 16) * GIB // 1000


@pytest.mark.parametrize(
    ("budget", "max_rows", "page_size", "pool", "context", "expected"),
    [
        (8192, 4096, 16, 10**6, 4096, Trial(MAX_ROWS, 16, 2 * MAX_ROWS + 1)),
        (8192, 8, 16, 10**6, 4096, Trial(8, 1024, 8 * 65 + 1)),
        (8192, 1, 16, 10**6, 512, Trial(1, 511, 33)),  # no row is longer than the context
        (8192, 4096, 16, 640, 4096, Trial(40, 15, 41)),  # no trial needs more than the pool
        (8192, 4096, 1, 2, 4096, Trial(1, 1, 3)),
        (16, 4096, 16, 10**6, 4096, Trial(14, 1, 15)),
    ],
)
def test_trials(
    budget: int, max_rows: int, page_size: int, pool: int, context: int, expected: Trial
) -> None:
    trial = Trial.of(budget, max_rows, page_size, pool, context)
    assert trial == expected
    assert (trial.num_pages - 1) * page_size <= max(pool, page_size)


def test_an_engine_whose_pool_is_sized_by_a_trial(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, but for the device: the step is one step, and what serves later is allocated."""
    settings = {"max_prefill_tokens": 256, "device": "cpu", "attention_backend": "torch_native"}
    config = engine_config({"model_path": tiny_model, **settings})
    estimate = launch.sizes_of(config, launch.open_checkpoint(config.model), launch.Share())
    trial = Trial.of(256, 8, 16, estimate.pool_tokens, 64)
    fake = FakeDevice().install(monkeypatch)
    plans: list[tuple[int, int, int]] = []
    execute = Runner.execute

    def recorded(runner: Runner, plan: Plan, masks: Any = None) -> Any:
        assert runner.options.is_trial == (len(plans) == 0)
        plans.append((plan.row_slot.size, plan.token_ids.size, plan.sample_slot.size))
        fake.reserve(GIB)
        return execute(runner, plan, masks)

    def sizes_of(*arguments: Any) -> sizes.Sizes:
        memory = Memory(free=4 * GIB, weights=GIB, per_token=768, on_host=False, per_step=GIB)
        return replace(estimate, memory=memory, trial=trial)

    monkeypatch.setattr(Runner, "execute", recorded)
    monkeypatch.setattr(launch, "sizes_of", sizes_of)
    engine = build(config)
    assert plans[0] == (8, 8 * trial.width, 8)
    assert trial.width == 32
    assert not engine.runner.options.is_trial
    assert engine.core_config.num_pages == engine.runner.options.num_pages > trial.num_pages
