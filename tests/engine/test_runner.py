"""What the runner makes of plans: samples, log-probs, errors and refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.plan_builder import Opened, Params, build_plan, opened_sections, read_result
from tests.kernels.tiny import MemoryCheckpoint, memory_checkpoint, reference_model, tiny_runner

from trunkline.engine.runner import Runner, RunnerOptions, resolve_dtype
from trunkline.kernels import select_backend

PROMPT = [5, 90, 17, 3, 44, 120, 8]


@cache
def checkpoint() -> MemoryCheckpoint:
    return memory_checkpoint("llama")


@cache
def shared_runner() -> Runner:
    return tiny_runner(checkpoint())


def one_row(**changes: Any) -> dict[str, Any]:
    """A plan that opens slot 0, computes PROMPT and samples once."""
    sections: dict[str, Any] = {
        "closed_slots": [0],
        **opened_sections([Opened(0, len(PROMPT), Params())]),
        "row_slot": [0],
        "row_query_len": [len(PROMPT)],
        "row_computed_len": [0],
        "row_token_source": [0],
        "token_ids": PROMPT,
        "positions": list(range(len(PROMPT))),
        "page_writes": [[0, 0, 0, 1]],
        "logit_tokens": [len(PROMPT) - 1],
        "logit_top_n": [0],
        "logit_flags": [0],
        "score_offsets": [0, 0],
        "sample_logit": [0],
        "sample_slot": [0],
        "sample_position": [len(PROMPT)],
        "sample_flags": [0],
    }
    return {**sections, **changes}


def execute(runner: Runner, sections: dict[str, Any], **extra: Any) -> dict[str, np.ndarray]:
    return read_result(runner.execute(build_plan(1, sections), **extra))


@cache
def expected_logprobs() -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(reference_model("llama")(torch.tensor([PROMPT])).logits[0], -1)


def test_prompt_scores_equal_transformers() -> None:
    """Log-probs at every position: given ids, the best n, and none where none are asked."""
    positions = list(range(len(PROMPT)))
    result = execute(
        shared_runner(),
        one_row(
            logit_tokens=positions,
            logit_top_n=[3, 0, 2, 0, 0, 0, 1],
            logit_flags=[0] * 7,
            score_offsets=[0, 1, 2, 4, 5, 5, 6, 6],
            score_ids=[90, 17, 3, 199 - 1, 44, 0],
            sample_logit=[6],
            sample_flags=[1],
        ),
    )
    expected = expected_logprobs()
    scored = expected[[0, 1, 2, 2, 3, 5], [90, 17, 3, 198, 44, 0]].numpy()
    np.testing.assert_allclose(result["score_logprobs"], scored, atol=1e-4)
    best = [expected[row].argsort(descending=True)[:n] for row, n in ((0, 3), (2, 2), (6, 1))]
    assert result["top_ids"].tolist() == torch.cat(best).tolist()
    assert result["token_ids"].tolist() == [int(expected[6].argmax())]
    np.testing.assert_allclose(result["sampled_logprobs"], [float(expected[6].max())], atol=1e-4)
    assert result["row_errors"].size == 0


def test_log_probs_are_of_samples_that_asked() -> None:
    sections = one_row(
        **opened_sections([Opened(slot, len(PROMPT), Params()) for slot in (0, 1)]),
        sample_logit=[0, 0],
        sample_slot=[0, 1],
        sample_position=[len(PROMPT)] * 2,
        sample_flags=[0, 1],
    )
    result = execute(shared_runner(), sections)
    assert result["sampled_logprobs"][0] == 0
    assert result["sampled_logprobs"][1] < 0


def test_samples_that_share_a_logit_position_differ_by_slot() -> None:
    """N samples of one prompt: own seeds and bias, own last tokens."""
    params = [
        Params(),
        Params(bias={77: 1e4}),
        *(Params(temperature=5.0, seed=seed) for seed in range(10)),
    ]
    opened = [Opened(slot, len(PROMPT), p) for slot, p in enumerate(params)]
    result = execute(
        shared_runner(),
        one_row(
            **opened_sections(opened),
            sample_logit=[0] * 12,
            sample_slot=list(range(12)),
            sample_position=[len(PROMPT)] * 12,
            sample_flags=[0] * 12,
        ),
    )
    tokens = result["token_ids"].tolist()
    assert tokens[0] == int(expected_logprobs()[-1].argmax())
    assert tokens[1] == 77
    assert len(set(tokens[2:])) > 5
    assert result["sample_counts"].tolist() == [1] * 12


def test_no_logits_and_no_samples() -> None:
    empty = {
        name: []
        for name in (
            "logit_tokens logit_top_n logit_flags sample_logit sample_slot sample_position "
            "sample_flags"
        ).split()
    }
    result = execute(shared_runner(), one_row(**empty, score_offsets=[0]))
    assert all(result[name].size == 0 for name in ("token_ids", "sample_counts", "row_errors"))


def test_grammar_mask_forces_a_token() -> None:
    masks = np.zeros((1, 7), np.int32)
    masks[0, 3] = 1 << 4
    opened = opened_sections([Opened(0, len(PROMPT), Params(grammar=True))])
    result = execute(shared_runner(), one_row(**opened), masks=masks)
    assert result["token_ids"].tolist() == [100]
    result = execute(shared_runner(), one_row(**opened), masks=np.zeros((1, 7), np.int32))
    assert result["row_errors"].tolist() == [3]


def test_a_missing_mask_can_be_supplied_after_the_refusal() -> None:
    runner = shared_runner()
    plan = build_plan(1, one_row(**opened_sections([Opened(0, len(PROMPT), Params(grammar=True))])))
    runner.forward(plan)
    with pytest.raises(ValueError, match="mask"):
        runner.sample(plan)
    masks = np.full((1, 7), -1, np.int32)
    result = read_result(runner.sample(plan, masks).wait())
    assert result["token_ids"].tolist() == [int(expected_logprobs()[-1].argmax())]


def test_sampling_needs_its_forward_pass() -> None:
    runner = tiny_runner(checkpoint())
    with pytest.raises(ValueError, match="forward"):
        runner.sample(build_plan(1, one_row()))


def test_min_new_tokens_hold_an_end_token_back() -> None:
    """The end token is always best, and still comes only as the fourth token."""
    params = Params(bias={11: 1e4}, min_new_tokens=3, suppressed=[11])
    sequence = Sequence(PROMPT, params)
    Driver(shared_runner()).generate([sequence], 5)
    assert 11 not in sequence.output[:3]
    assert sequence.output[3:] == [11, 11]


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-6, 1e-5, 1e-4])
def test_tiny_temperature_equals_greedy(temperature: float) -> None:
    greedy, other = Sequence(PROMPT), Sequence(PROMPT, Params(temperature=temperature, seed=4))
    Driver(shared_runner()).generate([greedy, other], 20)
    assert other.output == greedy.output


def test_frequency_penalty_breaks_loops_in_a_greedy_batch() -> None:
    plain = Sequence(PROMPT, Params(bias={50: 30.0}))
    penalised = Sequence(PROMPT, Params(bias={50: 30.0}, frequency=2.0))
    Driver(shared_runner()).generate([plain, penalised], 40)
    assert plain.output == [50] * 40
    assert penalised.output.count(50) < 40


def nan_embedding(token: int) -> MemoryCheckpoint:
    made = memory_checkpoint("llama")
    table = made.weights["model.embed_tokens.weight"].clone()
    table[token] = torch.nan
    made.weights["model.embed_tokens.weight"] = table
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_is_not_finite_fails_alone(dtype: str) -> None:
    """One prompt holds a token whose embedding is NaN; its neighbours do not notice."""
    runner = tiny_runner(nan_embedding(150), dtype=dtype)
    fine = [Sequence(PROMPT), Sequence(PROMPT[:3], Params(temperature=1.0, seed=3))]
    alone = [Sequence(PROMPT), Sequence(PROMPT[:3], Params(temperature=1.0, seed=3))]
    bad = Sequence([1, 150, *PROMPT])
    Driver(runner).generate(alone, 10)
    Driver(runner).generate([fine[0], bad, fine[1]], 10)
    assert [f.output for f in fine] == [a.output for a in alone]
    assert [f.logprobs for f in fine] == [a.logprobs for a in alone]
    assert set(bad.errors) == {1}
    assert all(not any(f.errors) for f in fine)
    assert np.isfinite(bad.logprobs).all()


def test_a_chunk_that_is_not_finite_fails_before_it_has_logits() -> None:
    runner = tiny_runner(nan_embedding(150))
    bad = Sequence([1, 150, *PROMPT])
    driver = Driver(runner)
    driver.open(bad)
    driver.step([(bad, 4)])
    assert bad.errors == [1]


def test_pages_of_a_failed_row_are_harmless_to_the_next_owner() -> None:
    runner = tiny_runner(nan_embedding(150), num_pages=4)
    bad, after, expected = Sequence([150] * 20), Sequence(PROMPT), Sequence(PROMPT)
    Driver(runner).generate([expected], 5)
    driver = Driver(runner)
    driver.generate([bad], 1)
    driver.release([bad])
    driver.generate([after], 5)
    assert after.output == expected.output


def test_unknown_token_ids_fail_their_row_alone() -> None:
    fine, bad, expected = Sequence(PROMPT), Sequence([4, 199, 2]), Sequence(PROMPT)
    Driver(shared_runner()).generate([expected], 3)
    driver = Driver(shared_runner())
    for sequence in (bad, fine):
        driver.open(sequence)
    driver.step([(bad, 3), (fine, len(PROMPT))])
    assert (bad.errors, fine.errors) == ([3], [0])
    assert fine.output == expected.output[:1]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"row_slot": [], "row_query_len": [], "row_computed_len": [], "token_ids": []}, "no rows"),
    ({"opened_int": [[0, 7, 0, 1, 0, 0, 0, 0]]}, "adapters"),
    ({"page_moves": [[1, 1, 0, 2, 3, 0]]}, "tiers"),
    ({"page_moves": [[0, 1, 0, 2, 17, 0]]}, "exceeds its page"),
    ({"page_moves": [[0, 1, 0, 0, 3, 0]]}, "moved pages"),
    ({"page_writes": [[1, 0, 0, 1]]}, "cache group"),
    ({"page_writes": [[0, 0, 0, 0]]}, "pages must be"),
    ({"page_writes": [[0, 0, 0, 400]]}, "pages must be"),
    ({"page_writes": [[0, 0, 32, 1]]}, "page index"),
    ({"row_slot": [40]}, "row slots"),
    ({"row_computed_len": [506]}, "max_context_len"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refusals_change_nothing(changes: dict[str, Any], message: str) -> None:
    runner = tiny_runner(checkpoint(), num_pages=400)
    expected = execute(runner, one_row())["token_ids"].tolist()
    with pytest.raises(ValueError, match=message):
        runner.execute(build_plan(1, one_row(**changes)))
    assert execute(runner, one_row())["token_ids"].tolist() == expected


def test_a_token_without_a_page_is_refused() -> None:
    runner = tiny_runner(checkpoint())
    with pytest.raises(ValueError, match="no page"):
        runner.execute(build_plan(1, one_row(page_writes=[])))


@pytest.mark.parametrize(
    ("requested", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", "cpu", torch.bfloat16),
        ("auto", "float32", "cpu", torch.float32),
        ("auto", "float16", "cpu", torch.float32),
        ("auto", "float16", "cuda", torch.float16),
        ("half", "bfloat16", "cpu", torch.float16),
        ("float", "bfloat16", "cpu", torch.float32),
    ],
)
def test_dtype_rule(requested: str, stored: str, device: str, expected: torch.dtype) -> None:
    assert resolve_dtype(requested, stored, torch.device(device)) == expected


def test_unknown_dtype_backend_and_page_size() -> None:
    with pytest.raises(ValueError, match="int8"):
        resolve_dtype("int8", "float32", torch.device("cpu"))
    with pytest.raises(ValueError, match="'cuda'"):
        select_backend(torch.device("cpu"), torch.float32, "cuda")
    with pytest.raises(ValueError, match="page_size 24"):
        tiny_runner(checkpoint(), page_size=24, backend="torch")


def test_float16_on_request() -> None:
    sequence, again = Sequence(PROMPT), Sequence(PROMPT)
    runner = tiny_runner(checkpoint(), dtype="half")
    Driver(runner).generate([sequence], 5)
    Driver(runner).generate([again, Sequence(PROMPT[:4])], 5, chunk=2)
    assert again.output == sequence.output


def test_memory_facts() -> None:
    memory = tiny_runner(checkpoint(), backend="torch").memory
    assert memory.page_bytes == 3 * 2 * 2 * 8 * 16 * 4
    assert memory.pool_bytes == 400 * memory.page_bytes
    parameters = sum(tensor.numel() for tensor in checkpoint().weights.values())
    assert memory.weight_bytes == parameters * 4


def test_threads_of_torch_are_left_alone() -> None:
    before = (torch.get_num_threads(), torch.is_grad_enabled())
    options = RunnerOptions(
        num_pages=20, max_running_requests=2, max_context_len=64, progress=False
    )
    runner = Runner(checkpoint(), options)
    Driver(runner).generate([Sequence(PROMPT)], 3)
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before
