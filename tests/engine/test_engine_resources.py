"""Settings worked out from model and machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trunkline.engine import launch, resources, sizes
from trunkline.engine.config import CacheOptions, SchedulerOptions
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.resources import GIB, Memory, SettingError
from trunkline.engine.shares import Share

MODEL = DecoderConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position=8192,
    tie_word_embeddings=True,
)
HOST = Memory(free=10 * GIB, weights=GIB, per_token=23040, on_host=True)


def test_sizes_of_weights_and_kv() -> None:
    assert resources.weight_bytes(MODEL, 1) == 134_515_008  # SmolLM2-135M's parameters
    assert resources.kv_token_bytes(MODEL, 2) == 23040


def test_each_of_several_engines_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert str(sizes.resolve_device("auto", Share())) == "cuda"
    assert str(sizes.resolve_device("auto", Share(rank=1, count=2))) == "cuda:1"
    assert str(sizes.resolve_device("cpu", Share(rank=1, count=3))) == "cpu"
    assert chosen == [1]
    with pytest.raises(SettingError, match="dp_size is 3, but torch sees 2"):
        sizes.resolve_device("cuda", Share(rank=0, count=3))


def test_the_pool_takes_its_share_in_whole_pages() -> None:
    tokens = resources.pool_tokens(CacheOptions(), HOST, 8192, 256)
    assert tokens == 3 * GIB // 23040 // 16 * 16
    of_two = replace(HOST, num_engines=2)
    assert resources.pool_tokens(CacheOptions(), of_two, 8192, 256) == 2 * GIB // 23040 // 16 * 16
    half = CacheOptions(mem_fraction_static=0.5, page_size=1)
    assert resources.pool_tokens(half, HOST, 8192, 256) == 4 * GIB // 23040
    fixed = CacheOptions(max_total_tokens=1000)
    assert resources.pool_tokens(fixed, HOST, 8192, 256) == 992


def test_the_pool_is_no_larger_than_can_be_used() -> None:
    assert resources.pool_tokens(CacheOptions(), HOST, 128, 4) == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CacheOptions(page_size=0), "page_size is 0"),
        (CacheOptions(mem_fraction_static=1.5), "mem_fraction_static is 1.5"),
        (CacheOptions(mem_fraction_static=0.05), "no memory is left for the KV pool"),
        (CacheOptions(max_total_tokens=15), "max_total_tokens has 15 tokens"),
        (CacheOptions(max_total_tokens=10**9), r"takes 21457\.\d GiB.* at most 419430 tokens fit"),
    ],
)
def test_impossible_pools_are_refused(options: CacheOptions, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resources.pool_tokens(options, HOST, 8192, 256)


def test_context_lengths_beyond_the_model_are_refused() -> None:
    assert resources.context_length(None, MODEL) == 8192
    assert resources.context_length(100, MODEL) == 100
    with pytest.raises(SettingError, match="must be 2 to 8192"):
        resources.context_length(8193, MODEL)


@pytest.mark.parametrize(
    ("times", "target_s", "expected"),
    [
        ([(256, 0.1)], 0.2, 512),  # one point: no fixed cost is known
        ([(64, 0.05), (256, 0.1)], 0.2, 640),  # 0.0333 s fixed, 0.26 ms a token
        ([(64, 1.0), (256, 4.0)], 0.2, resources.MIN_BUDGET_TOKENS),
        ([(256, 0.001), (1024, 0.001)], 0.2, resources.MAX_BUDGET_TOKENS),
    ],
)
def test_step_budgets(times: list[tuple[int, float]], target_s: float, expected: int) -> None:
    assert resources.step_budget(times, target_s) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("target_s", "fixed_s", "token_s"),
    [
        (0.005, 0.004, 0.00025),  # the first two
        (0.03, 0.003533, 0.000257),  # the second and the third
        (0.0687, 0.003533, 0.000257),
        (0.5, 0.0, 0.000299),  # beyond the last, where nothing is fixed any more
    ],
)
def test_step_times_are_those_of_steps_like_the_target(
    target_s: float, fixed_s: float, token_s: float
) -> None:
    times = [(16, 0.008), (64, 0.02), (256, 0.0694), (1024, 0.299)]
    measured = resources.step_time(times, target_s)
    assert (measured.fixed_s, measured.token_s) == pytest.approx((fixed_s, token_s), abs=1e-6)
    assert measured.tokens(fixed_s + 100.5 * measured.token_s) == pytest.approx(100, abs=2)
    assert measured.tokens(fixed_s / 2) == 0


def test_a_disturbed_measurement_does_not_make_tokens_free() -> None:
    measured = resources.step_time([(16, 0.03), (64, 0.02)], 0.04)
    assert (measured.fixed_s, measured.token_s) == pytest.approx((0.01, 0.01 / 64))


def test_conservativeness_scales_the_ratio() -> None:
    assert resources.new_token_ratios(1.0) == pytest.approx((0.7, 0.098))
    assert resources.new_token_ratios(2.0) == pytest.approx((1.0, 0.14))
    with pytest.raises(SettingError):
        resources.new_token_ratios(0.0)


def test_an_order_of_priorities_needs_the_policy() -> None:
    low_first = SchedulerOptions(schedule_low_priority_values_first=True)
    with pytest.raises(SettingError, match="no effect with schedule_policy 'fcfs'"):
        resources.check_queue_order(low_first)
    resources.check_queue_order(replace(low_first, schedule_policy="priority"))
    resources.check_queue_order(SchedulerOptions())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode_log_interval", 0),
        ("decode_log_interval", None),
        ("target_step_ms", 0.5),
        ("target_mixed_step_ms", 0.5),
        ("max_queued_requests", 0),
        ("stream_interval", "1"),
        ("page_size", True),
        ("waiting_timeout_s", float("nan")),
    ],
)
def test_settings_below_their_minimum_are_refused(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"{name} is {value!r}, but must be a number from"):
        launch.engine_config({name: value})


def test_a_limit_may_be_left_to_the_engine() -> None:
    config = launch.engine_config({"max_queued_requests": None, "max_total_tokens": 64})
    assert config.scheduler.max_queued_requests is None
    assert config.cache.max_total_tokens == 64


def test_chunk_and_running_limits() -> None:
    assert resources.chunk_tokens(SchedulerOptions(chunked_prefill_size=-1)) is None
    assert resources.chunk_tokens(SchedulerOptions(chunked_prefill_size=17)) == 17
    with pytest.raises(SettingError):
        resources.chunk_tokens(SchedulerOptions(chunked_prefill_size=0))
    assert resources.max_running_requests(SchedulerOptions(), on_host=True) == 256
    with pytest.raises(SettingError):
        resources.max_running_requests(SchedulerOptions(max_running_requests=0), on_host=True)
