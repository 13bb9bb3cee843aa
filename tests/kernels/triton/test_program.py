"""Whole models through the Triton backend, against the reference backend.

Schedules are a naive driver's: prompts whole and in chunks, batches that change, prefixes from the
cache. Decode steps run in padded buckets, as the captured ones of a GPU do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.plan_builder import Opened, Params, read_result
from tests.kernels.test_pooled_states import Pooling
from tests.kernels.tiny import FAMILIES, memory_checkpoint, scaled_checkpoint, tiny_runner

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.runner import Runner
from trunkline.kernels import BackendOptions, PendingResult
from trunkline.kernels.triton import draw, program
from trunkline.kernels.triton.slots import DeviceSlots
from trunkline.kernels.triton.staging import StagingArena
from trunkline.plan import ROW_FAILED, Plan, encode_result

TOP_N = 3
# Of log-probs: float32 sums in another order; bfloat16 rounds activations at every layer.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15}
SAMPLED = Params(temperature=0.9, top_p=0.95, top_k=50, seed=7)
PENALISED = replace(SAMPLED, frequency=0.5, presence=0.2, repetition=1.2, seed=8)


@cache
def triton_runner(family: str, dtype: str = "float32", **options: Any) -> Runner:
    computation = BackendOptions(**{"max_graph_batch": 4, "attention": "triton", **options})
    made = memory_checkpoint(family)
    return tiny_runner(made, dtype=dtype, backend="triton", computation=computation)


@cache
def reference_runner(family: str, dtype: str = "float32") -> Runner:
    return tiny_runner(memory_checkpoint(family), dtype=dtype, backend="torch")


def prompts(lengths: tuple[int, ...], seed: int = 5) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 199, length).tolist() for length in lengths]


def sequences(lengths: tuple[int, ...]) -> list[Sequence]:
    """Greedy, sampled and penalised in turn."""
    params = (Params(), SAMPLED, PENALISED)
    return [Sequence(p, params[i % 3]) for i, p in enumerate(prompts(lengths))]


def agree(got: list[Sequence], expected: list[Sequence], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.errors == []
        assert one.output == other.output
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=tolerance)
        for tops, others in zip(one.tops, other.tops, strict=True):
            values = [value for _, value in tops]
            np.testing.assert_allclose(values, [value for _, value in others], atol=tolerance)
            assert [token for token, _ in tops] == [token for token, _ in others]


def reference(family: str, lengths: tuple[int, ...], num_tokens: int) -> list[Sequence]:
    made = sequences(lengths)
    Driver(reference_runner(family), TOP_N).generate(made, num_tokens)
    return made


def same_bits(left: Sequence, right: Sequence) -> bool:
    return (left.output, left.logprobs, left.tops) == (right.output, right.logprobs, right.tops)


@pytest.mark.parametrize(
    ("family", "lengths", "chunk"), [("qwen3", (3, 20, 1), 11), ("gemma2", (40,), 40)]
)
def test_prompts_in_chunks_and_decode_steps_in_buckets(
    family: str, lengths: tuple[int, ...], chunk: int
) -> None:
    got = sequences(lengths)
    Driver(triton_runner(family), TOP_N).generate(got, 3, chunk=chunk)
    agree(got, reference(family, lengths, 3), TOLERANCES["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 17])
def test_every_family(family: str, chunk: int | None) -> None:
    lengths = (60, 1, 17, 33, 16)
    got = sequences(lengths)
    Driver(triton_runner(family), TOP_N).generate(got, 5, chunk=chunk)
    agree(got, reference(family, lengths, 5), TOLERANCES["float32"])


@pytest.mark.slow
def test_bfloat16() -> None:
    """Greedy tokens of both agree where the reference is sure of them."""
    got, expected = [[Sequence(p) for p in prompts((30, 5))] for _ in range(2)]
    Driver(triton_runner("llama", "bfloat16"), TOP_N).generate(got, 4)
    Driver(reference_runner("llama", "bfloat16"), TOP_N).generate(expected, 4)
    for one, other in zip(got, expected, strict=True):
        assert one.output[0] == other.output[0]
        best = abs(one.logprobs[0] - other.logprobs[0])
        assert best < TOLERANCES["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_prefixes_from_the_cache(deterministic: bool) -> None:
    """Whole pages shared, and part of a page copied from a donor."""
    runner = triton_runner("llama", deterministic=deterministic)
    driver = Driver(runner, TOP_N)
    donors, requests = sequences((40,)), sequences((40,))
    driver.generate(donors, 3)
    driver.share_prefix(donors[0], requests[0], 37)
    driver.generate(requests, 3)
    agree(requests, reference("llama", (40,), 3), TOLERANCES["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2-mixed-window", "qwen3-moe", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits(family: str, dtype: str) -> None:
    """Alone, batched, in chunks, token by token and behind a cached prefix."""
    runner = triton_runner(family, dtype, deterministic=True)
    lengths = (21, 4)
    alone = sequences(lengths)
    for sequence in alone:
        Driver(runner, TOP_N).generate([sequence], 3)
    for chunk in (None, 6, 1):
        together = sequences(lengths)
        Driver(runner, TOP_N).generate(together, 3, chunk=chunk)
        for one, other in zip(alone, together, strict=True):
            assert same_bits(one, other), chunk
    driver = Driver(runner, TOP_N)
    donors, cached = sequences(lengths), sequences(lengths)
    driver.generate(donors, 3)
    driver.share_prefix(donors[0], cached[0], 19)
    driver.generate(cached, 3)
    assert same_bits(alone[0], cached[0])


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_and_values_in_fp8(deterministic: bool) -> None:
    """Log-probs stay near: e4m3 keeps 3 bits of mantissa."""
    runner = triton_runner("llama-wide", kv_dtype="fp8_e4m3", deterministic=deterministic)
    assert runner.memory.page_bytes == reference_runner("llama-wide").memory.page_bytes // 4
    near(runner, "llama-wide", 0.2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_scales_of_keys_and_values_in_fp8(deterministic: bool) -> None:
    """Without them the larger ones would be cut off at 448."""
    options = BackendOptions(kv_dtype="fp8_e4m3", deterministic=deterministic)
    plain, scaled = (
        Driver(tiny_runner(made, backend="triton", computation=options), TOP_N)
        for made in (memory_checkpoint("llama"), scaled_checkpoint("llama", 2**10, 2**12))
    )
    left, right = sequences((20,)), sequences((20,))
    plain.generate(left, 3, chunk=12)
    scaled.generate(right, 3, chunk=12)
    assert same_bits(left[0], right[0])


def test_pools_in_the_dtype_need_no_scales() -> None:
    options = BackendOptions(kv_dtype="auto")
    made = scaled_checkpoint("llama", 2**10, 2**12)
    got = sequences((20,))
    Driver(tiny_runner(made, backend="triton", computation=options), TOP_N).generate(got, 2)
    agree(got, reference("llama", (20,), 2), TOLERANCES["float32"])


@pytest.mark.slow
def test_weights_in_fp8() -> None:
    """In the deterministic mode: torch's own product needs a GPU for scales per row."""
    runner = triton_runner("llama-wide", quantization="fp8", deterministic=True)
    assert runner.memory.weight_bytes < reference_runner("llama-wide").memory.weight_bytes / 2
    near(runner, "llama-wide", 0.3)


def near(runner: Runner, family: str, tolerance: float) -> None:
    """First log-probs of some prompts are within `tolerance` of the reference's."""
    got, expected = [[Sequence(p) for p in prompts((30, 7))] for _ in range(2)]
    Driver(runner, TOP_N).generate(got, 1)
    Driver(reference_runner(family), TOP_N).generate(expected, 1)
    for one, other in zip(got, expected, strict=True):
        values = dict(other.tops[0])
        both = [(value, values[token]) for token, value in one.tops[0] if token in values]
        assert both
        assert all(abs(left - right) < tolerance for left, right in both)


@pytest.mark.slow
def test_graphs_change_nothing() -> None:
    """Buckets with padding rows, exact buckets, and none."""
    runs = []
    for largest in (0, 2, 8):
        made = sequences((9, 4, 12))
        runner = triton_runner("llama", max_graph_batch=largest)
        Driver(runner, TOP_N).generate(made, 4)
        runs.append(made)
    for made in runs[1:]:
        agree(made, runs[0], TOLERANCES["float32"])


def test_plain_draws_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without log-probs, penalties or masks the bucket's own draw is all that is launched."""
    runner = triton_runner("llama")
    driver = PlainDriver(runner, 0)
    got = [Sequence(p, Params(temperature=0.8, seed=i)) for i, p in enumerate(prompts((4, 7, 2)))]
    expected = [Sequence(s.prompt, s.params) for s in got]
    rows = [(s, len(s.prompt)) for s in got]
    for sequence in got:
        driver.open(sequence)
    driver.step(rows)
    monkeypatch.setattr(runner._program._sampler, "draw", None)  # type: ignore[attr-defined]
    driver.step([(s, 1) for s in got])
    driver.step([(s, 1) for s in got[:2]])
    PlainDriver(reference_runner("llama"), 0).generate(expected, 3)
    assert [s.output for s in got[:2]] == [s.output for s in expected[:2]]
    assert got[2].output == expected[2].output[:2]


@pytest.mark.parametrize(
    ("params", "launched"),
    [
        ((Params(), Params(top_k=3, top_p=0.5)), set()),
        ((Params(top_k=3), Params(temperature=0.8, seed=3, top_k=199, min_p=0.1)), {"noise"}),
        ((Params(), Params(temperature=0.8, seed=3, top_k=5)), {"cuts", "noise"}),
        ((Params(temperature=0.8, seed=3, top_p=0.5),), {"cuts", "noise"}),
    ],
)
def test_draws_leave_out_what_no_sample_needs(
    params: tuple[Params, ...], launched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With log-probs, so that nothing is a replay; tokens stay those of the reference."""
    found = set()
    for name, label in (("find_cuts", "cuts"), ("_launch_draw", "noise")):
        real = getattr(draw, name)

        def note(*args: Any, real: Any = real, label: str = label) -> None:
            found.add(label)
            real(*args)

        monkeypatch.setattr(draw, name, note)
    got = [Sequence([3, 4, 5 + i], one) for i, one in enumerate(params)]
    expected = [Sequence(s.prompt, s.params) for s in got]
    Driver(triton_runner("llama"), TOP_N).generate(got, 2)
    Driver(reference_runner("llama"), TOP_N).generate(expected, 2)
    agree(got, expected, TOLERANCES["float32"])
    assert found == launched


@pytest.mark.slow
def test_steps_that_are_too_large_to_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the arena's block that never moves: what does not fit it is no replay."""
    made = memory_checkpoint("llama")
    # Padded decode steps fit, but not with what opens three slots.
    monkeypatch.setattr(program, "STAGING_BYTES", 400)
    options = BackendOptions(max_graph_batch=4, attention="triton")
    driver = Driver(tiny_runner(made, backend="triton", computation=options), TOP_N)
    got = sequences((1, 1, 1))
    fits = []
    ask = StagingArena.fits
    monkeypatch.setattr(StagingArena, "fits", lambda *args: fits.append(ask(*args)) or fits[-1])
    driver.generate(got, 3)
    assert set(fits) == {True, False}
    agree(got, reference("llama", (1, 1, 1), 3), TOLERANCES["float32"])


@pytest.mark.slow
def test_pooled_states() -> None:
    """Of a prompt in chunks, next to one that goes on to decode."""
    found = []
    for runner in (triton_runner("qwen3"), reference_runner("qwen3")):
        pooled, other = (Sequence(prompt) for prompt in prompts((25, 6)))
        driver = Pooling(runner, [pooled])
        for sequence in (pooled, other):
            driver.open(sequence)
        for count in (12, 13):
            driver.step([(pooled, count), (other, 6 if not other.output else 1)])
        found.append(np.frombuffer(driver.states[id(pooled)], np.float32))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_steps_are_launched_before_results_are_waited_for() -> None:
    """Inputs and penalties of a step then rest on tokens that only the device knows."""
    late = LateRunner(triton_runner("llama"))
    got = [Sequence(p, PENALISED) for p in prompts((9, 4, 1))]
    Driver(late, 0).generate(got, 5)  # type: ignore[arg-type]
    steps = [read_result(pending.wait())["token_ids"].tolist() for pending in late.pending]
    expected = [Sequence(s.prompt, s.params) for s in got]
    Driver(reference_runner("llama"), 0).generate(expected, 5)
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == [s.output for s in expected]


class LateRunner:
    """Answers with nothing and keeps the results for later."""

    def __init__(self, runner: Runner) -> None:
        self.options = runner.options
        self.pending: list[PendingResult] = []
        self._runner = runner

    def execute(self, plan: Plan) -> np.ndarray:
        self._runner.forward(plan)
        self.pending.append(self._runner.sample(plan))
        count = plan.sample_slot.size
        nothing = {"token_ids": np.zeros(count, np.int32), "sampled_logprobs": np.zeros(count)}
        return encode_result(plan.step, {"sample_counts": np.ones(count, np.int32), **nothing})


class PlainDriver(Driver):
    """Wants no log-probs."""

    def _add_row(self, fields: dict[str, list[Any]], sequence: Sequence, count: int) -> bool:
        is_sampled = super()._add_row(fields, sequence, count)
        if is_sampled:
            fields["sample_flags"][-1] = 0
        return is_sampled

    def _take(
        self,
        rows: list[tuple[Sequence, int]],
        sampled: list[Sequence],
        result: dict[str, np.ndarray],
    ) -> None:
        assert result["row_errors"].size == 0
        for sequence, token in zip(sampled, result["token_ids"].tolist(), strict=True):
            sequence.output.append(token)
            sequence.sampled = True


def test_a_table_of_counts_that_cannot_grow_ends_a_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps behind it need not the lanes that it asked for."""
    options = BackendOptions(max_graph_batch=4, attention="triton")
    runner = tiny_runner(memory_checkpoint("llama"), backend="triton", computation=options)
    grow = DeviceSlots.reserve_lanes

    def short_of_memory(slots: DeviceSlots, num_lanes: int) -> None:
        if num_lanes > 1:
            raise RuntimeError("out of memory")
        grow(slots, num_lanes)

    monkeypatch.setattr(DeviceSlots, "reserve_lanes", short_of_memory)
    driver = Driver(runner, TOP_N)
    got = [Sequence(prompt, PENALISED) for prompt in prompts((4, 3, 2))]
    for sequence in got:
        driver.open(sequence)
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.step([(sequence, len(sequence.prompt)) for sequence in got])
    for sequence in got:
        driver.close(sequence)
    driver.generate(got[:1], 3)
    expected = Sequence(got[0].prompt, PENALISED)
    Driver(reference_runner("llama"), TOP_N).generate([expected], 3)
    agree(got[:1], [expected], TOLERANCES["float32"])


@pytest.mark.parametrize(("name", "slot"), [("opened", 40), ("opened", -1), ("closed", -1)])
def test_slots_that_there_are_not_are_refused(name: str, slot: int) -> None:
    """The device would write beside its tables."""
    runner = triton_runner("llama")
    driver = Driver(runner, 0)
    sequence = Sequence([3, 4])
    driver.open(sequence)
    if name == "opened":
        driver._opened.append(Opened(slot, 1, Params()))
    else:
        driver._closed.append(slot)
    with pytest.raises(ValueError, match=f"{name} slots must be below 40"):
        driver.step([(sequence, 2)])


@pytest.mark.parametrize("token", [-1, 199])
def test_ids_to_score_lie_in_the_vocabulary(token: int) -> None:
    """The device would read beside the logits."""
    driver = ScoringDriver(triton_runner("llama"), 0)
    driver.token = token
    sequence = Sequence([3, 4])
    driver.open(sequence)
    with pytest.raises(ValueError, match=r"score_ids of the plan holds ids .* has 199"):
        driver.step([(sequence, 2)])


class ScoringDriver(Driver):
    """Wants the log-prob of one token at every logit position."""

    token = 0

    def _add_row(self, fields: dict[str, list[Any]], sequence: Sequence, count: int) -> bool:
        is_sampled = super()._add_row(fields, sequence, count)
        if is_sampled:
            fields["score_ids"].append(self.token)
            fields["score_offsets"][-1] = len(fields["score_ids"])
        return is_sampled


def test_ids_beyond_the_vocabulary_fail_their_row_alone() -> None:
    runner = triton_runner("llama")
    good, bad = Sequence([3, 4]), Sequence([3, 199])
    driver = Driver(runner, 0)
    for sequence in (good, bad):
        driver.open(sequence)
    result = driver.step([(good, 2), (bad, 2)])
    assert result["row_errors"].tolist() == [0, ROW_FAILED]


@pytest.mark.slow
def test_rows_that_are_not_finite_end_alone() -> None:
    made = memory_checkpoint("llama")
    made.weights["model.embed_tokens.weight"][7] = torch.nan
    options = BackendOptions(max_graph_batch=4, attention="triton")
    driver = Driver(tiny_runner(made, backend="triton", computation=options), 0)
    good, bad = Sequence([3, 4, 5]), Sequence([3, 7, 5])
    for sequence in (good, bad):
        driver.open(sequence)
    result = driver.step([(good, 3), (bad, 3)])
    assert result["row_errors"].tolist() == [0, 1]
    expected = Sequence([3, 4, 5])
    Driver(reference_runner("llama"), 0).generate([expected], 1)
    assert good.output == expected.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flashinfer"}, "flashinfer cannot be used: it needs a CUDA device"),
        ({"attention": "fa4"}, "known: auto, flashinfer, triton"),
        ({"kv_dtype": "int4"}, "known: auto, fp8_e4m3"),
        ({"quantization": "awq"}, "no kernel backend 'triton' .* quantization 'awq'"),
        ({"quantization": "fp8"}, "multiples of 16, but down_proj"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, str], message: str) -> None:
    made = memory_checkpoint("llama")
    made.config = replace(made.config, intermediate_size=72)
    with pytest.raises((ValueError, CheckpointError), match=message):
        tiny_runner(made, backend="triton", computation=BackendOptions(**options))
