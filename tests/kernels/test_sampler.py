"""Sampling against simple references: sets, distributions, penalties, log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.kernels import SampleInputs
from trunkline.kernels.torch_reference.logprobs import log_normaliser
from trunkline.kernels.torch_reference.philox import gumbel_blocks
from trunkline.kernels.torch_reference.sampler import (
    TOP_CANDIDATES,
    adjust_logits,
    cut_to_top,
    gumbel_argmax,
    sample,
)

NOTHING_I = np.zeros(0, np.int32)
NOTHING_F = np.zeros(0, np.float32)


def inputs(num_samples: int, **changes: Any) -> SampleInputs:
    """Greedy samples, one per logit position, unless changed."""
    ones = np.ones(num_samples, np.float32)
    zeros = np.zeros(num_samples, np.float32)
    fields: dict[str, Any] = {
        "logit_index": np.arange(num_samples, dtype=np.int32),
        "temperature": zeros,
        "top_p": ones,
        "min_p": zeros,
        "top_k": np.zeros(num_samples, np.int32),
        "seed": np.arange(num_samples, dtype=np.int64),
        "position": np.full(num_samples, 7, np.int32),
        "counted_rows": NOTHING_I,
        "counted_ids": NOTHING_I,
        "counts": NOTHING_F,
        "frequency_penalty": zeros,
        "presence_penalty": zeros,
        "repetition_penalty": ones,
        "suppressed_rows": NOTHING_I,
        "suppressed_ids": NOTHING_I,
        "bias_rows": NOTHING_I,
        "bias_ids": NOTHING_I,
        "bias_values": NOTHING_F,
        "logprob_rows": NOTHING_I,
        "top_n": np.zeros(num_samples, np.int32),
        "score_offsets": np.zeros(num_samples + 1, np.int32),
        "score_ids": NOTHING_I,
    }
    for name, value in changes.items():
        current = fields.get(name)
        dtype = np.int32 if current is None else current.dtype
        array = np.asarray(value, dtype)
        broadcast = array.ndim == 0
        fields[name] = np.full(num_samples, array, dtype) if broadcast else array
    return SampleInputs(**fields)


def tied_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Logits with many exact ties."""
    generator = np.random.default_rng(seed)
    values = np.round(generator.normal(size=(rows, vocabulary)) * 2, 1)
    return torch.from_numpy(values.astype(np.float32))


def kept_by_sorting(row: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The reference: a stable sort, then a walk."""
    order = np.argsort(-row, kind="stable")
    order = order[: top_k if top_k > 0 else row.size]
    mass = np.exp(row[order].astype(np.float64))
    mass /= mass.sum()
    kept, before = set(), 0.0
    for token, share in zip(order.tolist(), mass.tolist(), strict=True):
        if kept and before >= top_p - 1e-12:
            break
        kept.add(token)
        before += share
    return kept


@pytest.mark.parametrize("vocabulary", [7, 100, 3 * TOP_CANDIDATES])
@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 40, 1500, 10**6])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_cut_equals_sorting(vocabulary: int, top_k: int, top_p: float) -> None:
    rows = tied_logits(4, vocabulary, seed=top_k)
    rows -= rows.amax(-1, keepdim=True)
    limits, masses = np.full(4, top_k, np.int32), np.full(4, top_p, np.float32)
    expected = [kept_by_sorting(row.numpy(), top_k, float(masses[0])) for row in rows]
    cut_to_top(rows, limits, masses)
    found = [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in rows]
    assert found == expected


def test_cut_leaves_rows_without_limits_alone() -> None:
    rows = tied_logits(3, 50, seed=0)
    before = rows.clone()
    cut_to_top(rows, np.array([0, 3, 0], np.int32), np.array([1.0, 1.0, 1.0], np.float32))
    assert torch.equal(rows[[0, 2]], before[[0, 2]])
    assert int(torch.isfinite(rows[1]).sum()) == 3


def draw(logits: torch.Tensor, count: int, **changes: Any) -> np.ndarray:
    """Draws at positions 0..count of one row of logits, all else equal."""
    made = inputs(
        count,
        **{"temperature": 1.0, "seed": 12345, **changes},
        logit_index=np.zeros(count),
        position=np.arange(count),
    )
    made = replace(made, top_n=np.zeros(1, np.int32), score_offsets=np.zeros(2, np.int32))
    return sample(logits[None], made).token_ids


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (1.5, 6, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    count = 40_000
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=12).astype(np.float32) * 1.5)
    scaled = (logits / temperature).numpy()
    kept = kept_by_sorting(scaled, top_k, top_p)
    probabilities = np.exp(scaled - scaled.max())
    keep = np.array([token in kept for token in range(12)]) & (probabilities >= min_p)
    expected = np.where(keep, probabilities, 0)
    expected *= count / expected.sum()
    drawn = draw(logits, count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = np.bincount(drawn, minlength=12)
    assert not found[~keep].any()
    chi_square = ((found - expected)[keep] ** 2 / expected[keep]).sum()
    degrees = keep.sum() - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_pruning_never_changes_a_draw() -> None:
    """Noise for everything gives the same winners as noise for those that can win."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((64, 1001), generator=generator) * 12
    rows -= rows.amax(-1, keepdim=True)
    seeds, positions = torch.arange(64), torch.arange(64) * 3
    noise = torch.stack(
        [
            gumbel_blocks(torch.arange(251), p.expand(251), s.expand(251)).flatten()[:1001]
            for s, p in zip(seeds, positions, strict=True)
        ]
    )
    assert torch.equal(gumbel_argmax(rows, seeds, positions), (rows + noise).argmax(-1))


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = tied_logits(32, 3000, seed=2)
    fields = {
        "temperature": np.linspace(0.1, 2, 32),
        "top_k": np.arange(32) * 7,
        "top_p": np.linspace(0.3, 1, 32),
        "min_p": np.where(np.arange(32) % 3 == 0, 0.05, 0),
        "seed": np.arange(32),
        "logprob_rows": np.arange(32),
        "top_n": np.full(32, 5),
    }
    together = sample(logits, inputs(32, **fields))
    for row in range(32):
        one = {
            name: [0] if name == "logprob_rows" else v[row : row + 1] for name, v in fields.items()
        }
        alone = sample(logits[row : row + 1], inputs(1, **one))
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.sampled_logprobs[0] == together.sampled_logprobs[row]
        assert np.array_equal(alone.top_ids, together.top_ids[row * 5 : row * 5 + 5])
        assert np.array_equal(alone.top_logprobs, together.top_logprobs[row * 5 : row * 5 + 5])


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn((8, 500), generator=torch.Generator().manual_seed(3)) * 10
    made = inputs(8, temperature=temperature)
    assert sample(logits, made).token_ids.tolist() == logits.argmax(-1).tolist()


def test_tiny_top_p_is_greedy() -> None:
    logits = torch.randn((8, 500), generator=torch.Generator().manual_seed(4))
    made = inputs(8, temperature=1.0, top_p=1e-6)
    assert sample(logits, made).token_ids.tolist() == logits.argmax(-1).tolist()


def test_greedy_ties_take_the_lowest_id() -> None:
    logits = torch.zeros((2, 100))
    logits[1, [40, 41, 90]] = 3.0
    assert sample(logits, inputs(2)).token_ids.tolist() == [0, 40]


def test_penalties_by_hand() -> None:
    rows = torch.tensor([[2.0, -1.0, 0.5, 4.0], [2.0, -1.0, 0.5, 4.0]])
    made = inputs(
        2,
        counted_rows=[0, 0, 1],
        counted_ids=[0, 1, 3],
        counts=[3, 1, 2],
        frequency_penalty=[0.5, 0.0],
        presence_penalty=[0.25, 0.0],
        repetition_penalty=[1.0, 2.0],
    )
    adjust_logits(rows, made)
    assert rows.tolist() == [[0.25, -1.75, 0.5, 4.0], [2.0, -1.0, 0.5, 2.0]]


def test_order_of_adjustments() -> None:
    """Additive penalties, suppression, repetition, mask, bias: each sees the former's result."""
    rows = torch.tensor([[1.0, 3.0, 3.0, 3.0, 3.0]])
    made = inputs(
        1,
        counted_rows=[0, 0],
        counted_ids=[0, 1],
        counts=[1, 1],
        presence_penalty=[2.0],
        repetition_penalty=[2.0],
        suppressed_rows=[0],
        suppressed_ids=[2],
        bias_rows=[0] * 5,
        bias_ids=[0, 1, 2, 3, 4],
        bias_values=[10, 10, 10, 10, 10],
        masks=[[0b10111]],
        mask_rows=[0],
    )
    adjust_logits(rows, made)
    # Id 0 turns negative before the repetition penalty, which then multiplies.
    assert rows.tolist() == [[-2.0 + 10, 0.5 + 10, -np.inf, -np.inf, 13.0]]


def test_masks_of_a_vocabulary_that_is_no_multiple_of_32() -> None:
    logits = torch.zeros((2, 70))
    masks = np.zeros((1, 3), np.int32)
    masks[0, 2] = 1 << 5
    masks[0, 1] = np.int32(-(2**31))
    made = inputs(2, masks=masks, mask_rows=[1], temperature=1.0)
    drawn = {int(sample(logits, made).token_ids[1])}
    for seed in range(20):
        made = inputs(2, masks=masks, mask_rows=[1], temperature=1.0, seed=[seed, seed])
        drawn.add(int(sample(logits, made).token_ids[1]))
    assert drawn == {63, 69}


def test_a_bias_does_not_undo_a_mask() -> None:
    made = inputs(1, masks=[[1]], mask_rows=[0], bias_rows=[0], bias_ids=[3], bias_values=[1e9])
    assert sample(torch.zeros((1, 8)), made).token_ids.tolist() == [0]


def test_nothing_left_is_reported() -> None:
    made = inputs(2, masks=[[0]], mask_rows=[1], temperature=[0.0, 1.0])
    outputs = sample(torch.zeros((2, 8)), made)
    assert outputs.sample_possible.tolist() == [True, False]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_stay_alone(bad: float) -> None:
    clean = torch.randn((3, 600), generator=torch.Generator().manual_seed(5))
    dirty = clean.clone()
    dirty[1, 17] = bad
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 0.9,
        "logprob_rows": [0, 1, 2],
        "top_n": [2, 2, 2],
        "score_offsets": [0, 1, 2, 3],
        "score_ids": [17, 17, 17],
    }
    expected, found = sample(clean, inputs(3, **fields)), sample(dirty, inputs(3, **fields))
    assert found.logit_finite.tolist() == [True, False, True]
    for name in ("token_ids", "sampled_logprobs", "score_logprobs"):
        assert np.array_equal(getattr(found, name)[[0, 2]], getattr(expected, name)[[0, 2]])
        assert np.isfinite(getattr(found, name)).all()
    assert np.isfinite(found.top_logprobs).all()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn((2, 300), generator=torch.Generator().manual_seed(6))
    made = inputs(
        2,
        temperature=0.3,
        bias_rows=[0],
        bias_ids=[5],
        bias_values=[100],
        logprob_rows=[0, 1],
        top_n=[4, 0],
        score_offsets=[0, 2, 3],
        score_ids=[9, 5, 7],
    )
    outputs = sample(logits, made)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    assert outputs.token_ids[0] == 5
    tokens = outputs.token_ids
    np.testing.assert_allclose(outputs.sampled_logprobs, expected[[0, 1], tokens], atol=1e-5)
    np.testing.assert_allclose(outputs.score_logprobs, expected[[0, 0, 1], [9, 5, 7]], atol=1e-5)
    assert outputs.top_ids.tolist() == np.argsort(-expected[0])[:4].tolist()


def test_processed_logprobs_are_of_what_is_drawn_from() -> None:
    logits = torch.randn((4, 300), generator=torch.Generator().manual_seed(6))
    made = inputs(
        4,
        temperature=[0.3, 0.0, 2.0, 0.5],
        top_k=[0, 0, 3, 0],
        bias_rows=[0, 1],
        bias_ids=[5, 5],
        bias_values=[2, 1],
        suppressed_rows=[0],
        suppressed_ids=[9],
        logprob_rows=[0, 1, 2, 3],
        top_n=[4, 0, 0, 0],
        score_offsets=[0, 2, 3, 4, 5],
        score_ids=[9, 5, 5, 7, 7],
        processed_rows=[0, 1, 2],
    )
    outputs = sample(logits, made)
    adjusted = logits.double()
    adjusted[0, 9] = -torch.inf
    adjusted[0, 5] += 2
    adjusted[1, 5] += 1
    divided = adjusted / torch.tensor([[0.3], [1.0], [2.0], [1.0]])  # the last is the model's own
    expected = torch.log_softmax(divided, -1).numpy()
    tokens = outputs.token_ids
    np.testing.assert_allclose(outputs.sampled_logprobs, expected[range(4), tokens], atol=1e-5)
    wanted = expected[[0, 0, 1, 2, 3], [9, 5, 5, 7, 7]]
    assert wanted[0] == -np.inf
    np.testing.assert_allclose(outputs.score_logprobs, wanted, atol=1e-5)
    assert outputs.top_ids.tolist() == np.argsort(-expected[0])[:4].tolist()


def test_top_logprobs_break_ties_by_id() -> None:
    logits = torch.zeros((1, 50))
    logits[0, [30, 8, 44]] = 1.0
    outputs = sample(logits, inputs(1, top_n=[5]))
    assert outputs.top_ids.tolist() == [8, 30, 44, 0, 1]


@pytest.mark.parametrize("vocabulary", [5, 512, 49152])
def test_normaliser_has_the_same_bits_in_any_batch(vocabulary: int) -> None:
    rows = torch.randn((9, vocabulary), generator=torch.Generator().manual_seed(7)) * 5
    together = log_normaliser(rows)
    for row in range(9):
        assert torch.equal(log_normaliser(rows[row : row + 1]), together[row : row + 1])
    torch.testing.assert_close(together[:, 0], rows.logsumexp(-1))


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 40), st.integers(0, 45), st.floats(0.01, 1.0), st.integers(0, 2**32 - 1))
def test_drawn_ids_are_in_the_set(vocabulary: int, top_k: int, top_p: float, seed: int) -> None:
    top_p = float(np.float32(top_p))
    logits = tied_logits(1, vocabulary, seed)
    kept = kept_by_sorting((logits - logits.max())[0].numpy(), top_k, top_p)
    made = inputs(1, temperature=1.0, top_k=top_k, top_p=top_p, seed=[seed])
    assert int(sample(logits, made).token_ids[0]) in kept
