"""Sampling kernels against the reference's sampler: equal tokens, equal sets."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from tests.kernels.test_sampler import inputs, kept_by_sorting, tied_logits
from tests.kernels.triton.guards import Guards

from trunkline.engine import resources
from trunkline.kernels import SampleInputs, SampleOutputs
from trunkline.kernels.torch_reference import sampler as reference
from trunkline.kernels.triton import levels
from trunkline.kernels.triton.rows import TILE
from trunkline.kernels.triton.sample import Counts, Samples, draw, note_tokens
from trunkline.kernels.triton.stepwise import _slot_tables, sample

# The interpreter computes with NumPy, which warns of what a GPU just does.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid):RuntimeWarning")


def assert_same(found: SampleOutputs, expected: SampleOutputs, made: SampleInputs) -> None:
    np.testing.assert_array_equal(found.logit_finite, expected.logit_finite)
    fine = expected.logit_finite[made.logit_index]
    np.testing.assert_array_equal(found.sample_possible[fine], expected.sample_possible[fine])
    fine &= expected.sample_possible
    np.testing.assert_array_equal(found.token_ids[fine], expected.token_ids[fine])


def check(logits: torch.Tensor, made: SampleInputs) -> SampleOutputs:
    before = logits.clone()
    found = sample(logits, made)
    assert torch.equal(logits, before) or bool(logits.isnan().any())
    assert_same(found, reference.sample(logits, made), made)
    return found


def random_inputs(
    random: np.random.Generator, num_rows: int, num_samples: int, vocabulary: int
) -> SampleInputs:
    """Everything that a step can ask of the draw, mixed."""

    def some(values: list[float]) -> np.ndarray:
        return random.choice(np.array(values), num_samples)

    pairs = random.integers(0, [num_samples, vocabulary], (3 * num_samples, 2))
    counted = np.unique(pairs[: 2 * num_samples], axis=0)
    biased = np.unique(pairs[num_samples:], axis=0)
    masked = np.flatnonzero(random.random(num_samples) < 0.3)
    words = random.integers(-(2**31), 2**31, (masked.size, -(-vocabulary // 32)))
    parts = {
        "counted_rows": counted[:, 0],
        "counted_ids": counted[:, 1],
        "counts": random.integers(1, 9, counted.shape[0]),
        "bias_rows": biased[:, 0],
        "bias_ids": biased[:, 1],
        "bias_values": random.normal(size=biased.shape[0]) * 5,
        "suppressed_rows": pairs[:num_samples, 0],
        "suppressed_ids": pairs[:num_samples, 1],
    }
    kinds = {"counted": 0.3, "bias": 0.3, "suppressed": 0.3}
    for kind in (kind for kind, share in kinds.items() if random.random() > share):
        for name in parts:
            if name.startswith(kind) or (kind == "counted" and name == "counts"):
                parts[name] = parts[name][:0]
    made = inputs(
        num_samples,
        logit_index=random.integers(0, num_rows, num_samples),
        temperature=some([0, 0.3, 1, 1, 1.7, 50]),
        top_k=some([0, 0, 1, 3, 20, 40, vocabulary // 2, vocabulary, 10**6]),
        top_p=some([1, 1, 0.1, 0.5, 0.9, 0.99, 1 - 2.0**-24]),
        min_p=some([0, 0, 1e-3, 0.1, 1]),
        seed=random.integers(-(2**63), 2**63, num_samples),
        position=random.integers(0, 2**31, num_samples),
        frequency_penalty=some([0, 0.3, -1]),
        presence_penalty=some([0, 0.7]),
        repetition_penalty=some([1, 1.3, 0.7]),
        **parts,
    )
    return replace(
        made,
        masks=words.astype(np.int32) if masked.size else None,
        mask_rows=masked.astype(np.int32),
        top_n=np.zeros(num_rows, np.int32),
        score_offsets=np.zeros(num_rows + 1, np.int32),
    )


def random_logits(random: np.random.Generator, num_rows: int, vocabulary: int) -> torch.Tensor:
    """Peaked and flat, fine and coarse, at times all but constant."""
    spread = random.choice([0.01, 1.0, 4.0, 30.0], (num_rows, 1))
    logits = random.normal(size=(num_rows, vocabulary)) * spread
    coarse = np.round(logits) + random.choice([0.0, -0.0], logits.shape)
    logits = np.where(random.random((num_rows, 1)) < 0.4, coarse, logits)
    return torch.from_numpy(logits.astype(np.float32))


def check_random(seed: int, vocabulary: int, num_samples: int) -> None:
    random = np.random.default_rng(seed)
    logits = random_logits(random, 4, vocabulary)
    check(logits, random_inputs(random, 4, num_samples, vocabulary))


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 37, 700, TILE, TILE + 1, 3 * TILE + 77])
def test_tokens_are_those_of_the_reference(vocabulary: int) -> None:
    check_random(vocabulary, vocabulary, 6)


def test_memory_of_candidates_is_counted() -> None:
    assert (levels.CAPACITY, 4 + 4) == (resources.LISTED_CANDIDATES, resources.LISTED_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_tokens_are_those_of_the_reference_in_many_steps(seed: int) -> None:
    vocabulary = (3, 33, 130, 999, 2500, 5000, 9999)[seed % 7]
    check_random(1000 + seed, vocabulary, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_tokens_over_a_large_vocabulary(seed: int) -> None:
    check_random(seed, 151_936, 6)


@pytest.mark.parametrize(("few", "capacity"), [(3, 8192), (3, 16)])
@pytest.mark.parametrize(
    "changes", [{"top_p": 0.95}, {"top_k": 500}, {"top_k": 600, "top_p": 0.9}, {"top_p": 1e-3}]
)
def test_second_round_and_more_candidates_than_are_listed(
    monkeypatch: pytest.MonkeyPatch, few: int, capacity: int, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(levels, "FEW", tl.constexpr(few))
    monkeypatch.setattr(levels, "CAPACITY", capacity)
    random = np.random.default_rng(1)
    logits = torch.from_numpy(random.normal(size=(3, 3000)).astype(np.float32))
    logits[1] = (logits[1] * 3).round() / 3
    logits[2] *= 6
    check(logits, inputs(3, temperature=1.0, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_second_round_in_many_steps(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(levels, "FEW", tl.constexpr(3))
    monkeypatch.setattr(levels, "CAPACITY", (8192, 20)[seed % 2])
    check_random(seed, (40, 700, 5000)[seed % 3], 12)


@pytest.mark.parametrize("top_k", [0, 1, 7, 13])
@pytest.mark.parametrize("top_p", [0.3, 0.5, 1.0])
def test_equal_logits(top_k: int, top_p: float) -> None:
    """All of a row are equal, 0 and -0 among them: which are kept is decided by their ids alone."""
    logits = torch.zeros(1, 20)
    logits[0, ::3] = -0.0
    made = inputs(
        4,
        logit_index=np.zeros(4),
        temperature=1.0,
        top_k=top_k,
        top_p=top_p,
        seed=np.arange(4),
    )
    made = replace(made, top_n=np.zeros(1, np.int32), score_offsets=np.zeros(2, np.int32))
    found = check(logits, made)
    kept = kept_by_sorting(np.zeros(20, np.float32), top_k, float(made.top_p[0]))
    assert set(found.token_ids.tolist()) <= kept


@pytest.mark.parametrize("temperature", [0.0, 9e-7, 1e-6, 1e-5, 1e30])
def test_extreme_temperatures_and_logits(temperature: float) -> None:
    random = np.random.default_rng(2)
    logits = torch.from_numpy(random.normal(size=(5, 300)).astype(np.float32))
    logits[1] *= 1e38
    logits[2] *= 1e-42  # subnormal
    logits[3, 7] = torch.finfo(torch.float32).max
    logits[4] = -torch.finfo(torch.float32).max
    check(logits, inputs(5, temperature=temperature))
    check(logits, inputs(5, temperature=temperature, top_p=0.7, top_k=50))


def test_rows_that_are_not_finite_are_reported_and_change_no_other() -> None:
    logits = tied_logits(5, TILE + 9, seed=3)
    logits[1, 5] = torch.nan
    logits[2, -1] = torch.inf
    logits[3, TILE - 1] = -torch.inf
    made = inputs(5, temperature=[1.0, 1.0, 0.0, 1.0, 1.0], top_p=[1.0, 0.5, 1.0, 1.0, 0.5])
    made = replace(made, top_n=np.full(5, 3, np.int32), logprob_rows=np.arange(5, dtype=np.int32))
    made = replace(made, bias_rows=np.array([1], np.int32), bias_ids=np.array([4], np.int32))
    made = replace(made, bias_values=np.ones(1, np.float32))
    found = check(logits, made)
    assert found.logit_finite.tolist() == [True, False, False, False, True]
    assert (found.token_ids >= 0).all()
    assert (found.token_ids < logits.shape[1]).all()
    assert not np.isnan(found.top_logprobs).any()
    assert not np.isnan(found.sampled_logprobs).any()


def test_a_mask_that_allows_nothing_is_reported() -> None:
    made = inputs(3, temperature=[0.0, 1.0, 1.0])
    masks = np.zeros((3, 2), np.int32)
    masks[2, 1] = 1 << 5
    made = replace(made, masks=masks, mask_rows=np.arange(3, dtype=np.int32))
    found = check(tied_logits(3, 50, seed=4), made)
    assert found.sample_possible.tolist() == [False, False, True]
    assert found.token_ids[2] == 37


@pytest.mark.parametrize("width", [63, 2 * TILE + 1])
def test_nothing_beyond_the_rows_is_read_or_written(guards: Guards, width: int) -> None:
    random = np.random.default_rng(width)
    logits = guards.full(random_logits(random, 4, width))
    check(logits, random_inputs(random, 4, 6, width))


def test_a_draw_does_not_depend_on_the_batch() -> None:
    random = np.random.default_rng(5)
    logits = random_logits(random, 3, 900)
    made = inputs(3, temperature=1.0, top_p=0.9, seed=[1, 2, 3])
    together = sample(logits, made).token_ids
    alone = [
        sample(logits[row : row + 1], inputs(1, temperature=1.0, top_p=0.9, seed=row + 1))
        for row in range(3)
    ]
    assert together.tolist() == [int(one.token_ids[0]) for one in alone]


def test_no_samples_and_no_rows() -> None:
    made = replace(inputs(0), top_n=np.zeros(2, np.int32), score_offsets=np.zeros(3, np.int32))
    assert sample(torch.zeros(2, 9), made).logit_finite.all()
    assert sample(torch.zeros(0, 9), inputs(0)).token_ids.size == 0


def test_greedy_steps_may_leave_the_draw_out() -> None:
    logits = tied_logits(4, 70, seed=6)
    made = inputs(4)
    expected = reference.sample(logits, made).token_ids
    device = logits.device
    samples = Samples(
        logit_index=torch.arange(4, dtype=torch.int32),
        slots=torch.arange(4, dtype=torch.int32),
        positions=torch.zeros(4, dtype=torch.int32),
    )
    slots = _slot_tables(made, device)
    draws = draw(logits, samples, slots, is_greedy=True)
    assert draws.token_ids.tolist() == expected.tolist()


def test_noted_tokens_are_counted_and_are_the_slots_last() -> None:
    table = torch.zeros((2, 10), dtype=torch.int32)
    table[1, 4] = 6
    last = torch.full((5,), -1, dtype=torch.int32)
    lanes = torch.tensor([1, -1, 0], dtype=torch.int32)
    tokens = torch.tensor([4, 9, 0], dtype=torch.int32)
    slots = torch.tensor([3, 0, 2], dtype=torch.int32)
    note_tokens(tokens, slots, last, Counts(lanes=lanes, table=table))
    assert last.tolist() == [9, -1, 0, 4, -1]
    assert table[1].tolist() == [0, 0, 0, 0, 7, 0, 0, 0, 0, 0]
    assert table[0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    note_tokens(tokens, slots, None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1},
    ],
)
@pytest.mark.slow
def test_distribution(changes: dict[str, float]) -> None:
    count = 2000
    row = np.random.default_rng(1).normal(size=12).astype(np.float32) * 1.5
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **changes}
    made = inputs(count, logit_index=np.zeros(count), position=np.arange(count), seed=9, **options)
    made = replace(made, top_n=np.zeros(1, np.int32), score_offsets=np.zeros(2, np.int32))
    found = np.bincount(sample(torch.from_numpy(row)[None], made).token_ids, minlength=12)
    scaled = row / options["temperature"]
    kept = kept_by_sorting(scaled, int(options["top_k"]), options["top_p"])
    probabilities = np.exp(scaled - scaled.max())
    keep = np.array([token in kept for token in range(12)]) & (probabilities >= options["min_p"])
    expected = np.where(keep, probabilities, 0)
    expected *= count / expected.sum()
    assert not found[~keep].any()
    chi_square = ((found - expected)[keep] ** 2 / expected[keep]).sum()
    degrees = keep.sum() - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 5
