"""Log-probs of the sampling kernels against the reference's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.test_sampler import inputs, tied_logits
from tests.kernels.triton.guards import Guards

from trunkline.kernels import SampleInputs
from trunkline.kernels.torch_reference import sampler as reference
from trunkline.kernels.triton.rows import TILE
from trunkline.kernels.triton.sample import LogProbRequest, draw, log_probs
from trunkline.kernels.triton.stepwise import Samples, _slot_tables, sample


def check(logits: torch.Tensor, made: SampleInputs) -> None:
    found, expected = sample(logits, made), reference.sample(logits, made)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    for name in ("sampled_logprobs", "score_logprobs", "top_logprobs"):
        one, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6, err_msg=name)


def request(
    made: SampleInputs, seed: int, num_rows: int, vocabulary: int, most: int
) -> SampleInputs:
    """Ask for something at every kind of position, also for nothing at some."""
    random = np.random.default_rng(seed)
    scored = random.integers(0, 4, num_rows)
    top_n = random.integers(0, most + 1, num_rows)
    top_n[0], scored[-1] = most, 0
    top_n[-1] = 0
    wanted = np.flatnonzero(random.random(made.logit_index.size) < 0.6)
    return replace(
        made,
        top_n=top_n.astype(np.int32),
        score_offsets=np.concatenate([[0], np.cumsum(scored)]).astype(np.int32),
        score_ids=random.integers(0, vocabulary, int(scored.sum())).astype(np.int32),
        logprob_rows=wanted.astype(np.int32),
    )


@pytest.mark.parametrize("vocabulary", [1, 6, 300, 3 * TILE + 50])
@pytest.mark.parametrize("most", [1, 5, 20])
def test_log_probs(guards: Guards, vocabulary: int, most: int) -> None:
    logits = guards.full(tied_logits(5, vocabulary, seed=vocabulary))
    logits[1] = 0.25
    made = inputs(4, temperature=[0.0, 1.0, 0.5, 0.0], logit_index=[0, 0, 2, 4])
    check(logits, request(made, most, 5, vocabulary, min(most, vocabulary)))


@pytest.mark.parametrize("vocabulary", [40, TILE + 50])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_processed_log_probs(vocabulary: int, temperature: float) -> None:
    logits = tied_logits(3, vocabulary, seed=1)
    made = inputs(3, temperature=temperature, frequency_penalty=0.4, repetition_penalty=1.2)
    masks = np.zeros((1, -(-vocabulary // 32)), np.int32)
    masks[0, 0] = 0b1011011
    made = replace(
        made,
        counted_rows=np.array([0, 0, 1], np.int32),
        counted_ids=np.array([3, 9, 9], np.int32),
        counts=np.array([2, 1, 5], np.float32),
        masks=masks,
        mask_rows=np.array([2], np.int32),
        processed_rows=np.array([0, 2], np.int32),
    )
    check(logits, request(made, 2, 3, vocabulary, 12))


def test_all_that_may_be_asked_for() -> None:
    logits = tied_logits(2, 2 * TILE, seed=2)
    logits[1, 5:] = logits[1, 4]
    check(logits, replace(inputs(2), top_n=np.array([128, 128], np.int32)))


def test_bits_do_not_depend_on_the_batch() -> None:
    logits = tied_logits(3, TILE + 3, seed=3)
    made = replace(inputs(3), top_n=np.full(3, 2, np.int32))
    together = sample(logits, made).top_logprobs.reshape(3, 2)
    for row in range(3):
        alone = sample(logits[row : row + 1], replace(inputs(1), top_n=np.full(1, 2, np.int32)))
        np.testing.assert_array_equal(alone.top_logprobs, together[row])


def test_too_many_are_refused() -> None:
    made = inputs(1)
    samples = Samples(
        logit_index=torch.zeros(1, dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int32),
        positions=torch.zeros(1, dtype=torch.int32),
    )
    draws = draw(torch.zeros(1, 300), samples, _slot_tables(made, torch.device("cpu")))
    wanted = LogProbRequest(
        is_wanted=torch.ones(1, dtype=torch.int32),
        top_n=torch.ones(1, dtype=torch.int32),
        max_top_n=129,
    )
    with pytest.raises(ValueError, match="max_top_n is 129, the limit is 128"):
        log_probs(draws, samples.logit_index, wanted)
