"""Given equal logits, the CPU kernels draw what the reference backend draws, and say the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.cpu_programs import SIZES, WIDTH, logits_program, random_logits
from tests.kernels.plan_builder import Opened, Params, build_plan, opened_sections, read_result

from trunkline.kernels import StepProgram


@dataclass
class Steps:
    """One program, and what its plans have opened so far."""

    program: StepProgram
    step: int = 0
    results: list[dict[str, np.ndarray]] = field(default_factory=list)

    def run(self, sections: dict[str, Any], masks: np.ndarray | None = None) -> None:
        self.step += 1
        plan = build_plan(self.step, sections)
        self.program.forward(plan)
        self.results.append(read_result(self.program.sample(plan, masks).wait()))


def sections_of(params: list[Params], position: int, opens: bool, top_n: int) -> dict[str, Any]:
    """Every sequence computes one token at `position` and samples the next one."""
    rows = len(params)
    slots = list(range(rows))
    sections: dict[str, Any] = {
        "row_slot": slots,
        "row_query_len": [1] * rows,
        "row_computed_len": [position] * rows,
        "row_token_source": [0] * rows,
        "token_ids": [(slot * 5 + position) % WIDTH for slot in slots],
        "positions": [position] * rows,
        "logit_tokens": slots,
        "logit_top_n": [top_n] * rows,
        "logit_flags": [0] * rows,
        "score_offsets": [2 * slot for slot in range(rows + 1)],
        "score_ids": [0, 3] * rows,
        "sample_logit": slots,
        "sample_slot": slots,
        "sample_position": [position + 1] * rows,
        "sample_flags": [1] * rows,
    }
    if opens:
        records = [Opened(slot, 1, p, [2, 2, 4][slot % 4 :]) for slot, p in enumerate(params)]
        sections |= {"closed_slots": slots, **opened_sections(records)}
        sections["page_writes"] = [[0, slot, 0, slot + 1] for slot in slots]
    return sections


def assert_same_results(ours: Steps, reference: Steps) -> None:
    for left, right in zip(ours.results, reference.results, strict=True):
        if left["row_errors"].size == left["token_ids"].size:
            for result in (left, right):  # a failed row's token means nothing
                for name in ("token_ids", "sampled_logprobs"):
                    result[name][left["row_errors"] != 0] = 0
        for name in ("token_ids", "top_ids", "row_errors", "sample_counts"):
            assert left[name].tolist() == right[name].tolist(), name
        for name in ("sampled_logprobs", "score_logprobs", "top_logprobs"):
            np.testing.assert_allclose(left[name], right[name], rtol=1e-5, atol=1e-5)


def random_params(count: int, vocabulary: int, seed: int) -> list[Params]:
    generator = np.random.default_rng(seed)

    def maybe(value: float, otherwise: float, share: float = 0.5) -> float:
        return value if generator.random() < share else otherwise

    params = []
    for _ in range(count):
        ids = generator.choice(vocabulary, 6, replace=False).tolist()
        params.append(
            Params(
                temperature=maybe(float(generator.uniform(0.2, 2.0)), 0.0, 0.8),
                top_p=maybe(float(generator.uniform(0.05, 1.0)), 1.0),
                min_p=maybe(float(generator.uniform(0.0, 0.3)), 0.0, 0.3),
                top_k=int(maybe(int(generator.integers(1, vocabulary)), 0)),
                frequency=maybe(float(generator.uniform(-1, 1)), 0.0, 0.3),
                presence=maybe(float(generator.uniform(-1, 1)), 0.0, 0.3),
                repetition=maybe(float(generator.uniform(0.5, 1.5)), 1.0, 0.3),
                min_new_tokens=int(generator.integers(0, 4)),
                seed=int(generator.integers(0, 2**63)) * 2 + 1,
                bias={token: float(generator.normal()) for token in ids[:2]},
                suppressed=ids[2:],
            )
        )
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [37, 1003, 20_011])
def test_draws_of_random_requests(vocabulary: int, dtype: torch.dtype) -> None:
    for spread in (0.5, 6.0):
        table = random_logits(vocabulary, spread, seed=vocabulary)
        if dtype == torch.bfloat16:
            table = (table / 4).bfloat16().float() * 4
        both = [Steps(logits_program(name, table, dtype)) for name in ("cpu", "torch")]
        params = random_params(24, vocabulary, seed=int(spread))
        for position in range(6):
            sections = sections_of(params, position, opens=position == 0, top_n=position)
            for steps in both:
                steps.run(sections)
        assert_same_results(*both)


def test_grammar_masks() -> None:
    vocabulary = 333
    table = random_logits(vocabulary, 4.0, seed=1)
    both = [Steps(logits_program(name, table, torch.float32)) for name in ("cpu", "torch")]
    generator = np.random.default_rng(4)
    params = random_params(8, vocabulary, seed=5)
    for index, entry in enumerate(params):
        entry.grammar = index % 2 == 0
    allowed = generator.random((8, 352)) < 0.1
    allowed[2] = False  # nothing is left: the row fails alone
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    for steps in both:
        steps.run(sections_of(params, 0, opens=True, top_n=0), masks)
    assert_same_results(*both)
    assert both[0].results[0]["row_errors"].tolist() == [0, 0, 3, 0, 0, 0, 0, 0]
    for sample in (0, 4, 6):
        assert allowed[sample, both[0].results[0]["token_ids"][sample]]
    for steps in both:
        with pytest.raises(ValueError, match="need a mask each"):
            steps.run(sections_of(params, 1, opens=False, top_n=0))


@pytest.mark.parametrize("vocabulary", [37, 1003])
def test_processed_logprobs(vocabulary: int) -> None:
    table = random_logits(vocabulary, 3.0, seed=vocabulary)
    both = [Steps(logits_program(name, table, torch.float32)) for name in ("cpu", "torch")]
    params = random_params(24, vocabulary, seed=9)
    for index, entry in enumerate(params):
        entry.processed = index % 3 > 0
        entry.grammar = index % 4 == 0
    allowed = np.random.default_rng(4).random((24, -(-vocabulary // 32) * 32)) < 0.5
    allowed[4] = False  # nothing is left: the row fails alone
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    for position in range(5):
        for steps in both:
            steps.run(sections_of(params, position, opens=position == 0, top_n=position), masks)
    assert_same_results(*both)
    assert not any(np.isnan(result["score_logprobs"]).any() for result in both[0].results)


def test_logits_that_are_not_finite_fail_their_row_alone() -> None:
    table = random_logits(100, 2.0, seed=3)
    for column, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        table[50 + column, 5 * column] = bad
    both = [Steps(logits_program(name, table, torch.float32)) for name in ("cpu", "torch")]
    params = [Params(temperature=1.0, seed=7) for _ in range(5)]
    for steps in both:
        steps.run(sections_of(params, 0, opens=True, top_n=2))
        result = steps.results[0]
        # Infinity or NaN in a weight times zero elsewhere is NaN: all rows that meet it fail.
        assert set(result["row_errors"].tolist()) <= {0, 1}
        for name in ("sampled_logprobs", "score_logprobs", "top_logprobs"):
            assert np.isfinite(result[name]).all(), name
    assert both[0].results[0]["row_errors"].tolist() == both[1].results[0]["row_errors"].tolist()


def test_many_logit_positions_and_samples_that_share_one() -> None:
    """More positions than are computed at once, prompt log-probs, several samples of a position."""
    vocabulary = 501
    table = random_logits(vocabulary, 3.0, seed=8)
    both = [Steps(logits_program(name, table, torch.float32)) for name in ("cpu", "torch")]
    length, samples = 60, 20
    params = [Params(temperature=1.0, top_p=0.9, seed=seed) for seed in range(samples)]
    records = [Opened(slot, length, entry) for slot, entry in enumerate(params)]
    sections = {
        **opened_sections(records),
        "page_writes": [[0, 0, index, index + 1] for index in range(4)],
        "row_slot": [0],
        "row_query_len": [length],
        "row_computed_len": [0],
        "row_token_source": [0],
        "token_ids": [position * 7 % WIDTH for position in range(length)],
        "positions": list(range(length)),
        "logit_tokens": list(range(length)),
        "logit_top_n": [position % 4 for position in range(length)],
        "logit_flags": [0] * length,
        "score_offsets": list(range(length + 1)),
        "score_ids": [position * 11 % vocabulary for position in range(length)],
        "sample_logit": [length - 1] * samples,
        "sample_slot": list(range(samples)),
        "sample_position": [length] * samples,
        "sample_flags": [slot % 2 for slot in range(samples)],
    }
    for steps in both:
        steps.run(sections)
    assert_same_results(*both)
    assert len(set(both[0].results[0]["token_ids"].tolist())) > 5


def test_slots_keep_their_state_until_they_are_closed() -> None:
    table = random_logits(64, 1.0, seed=2)
    both = [Steps(logits_program(name, table, torch.float32)) for name in ("cpu", "torch")]
    loud = [Params(frequency=50.0) for _ in range(3)]
    for steps in both:
        for position in range(5):
            steps.run(sections_of(loud, position, opens=position == 0, top_n=0))
        steps.run(sections_of([Params()] * 3, 0, opens=True, top_n=0))
        with pytest.raises(ValueError, match="not open"):
            steps.run(
                sections_of([Params()] * 4, 1, opens=False, top_n=0)
                | {"page_writes": [[0, 3, 0, 9]]}
            )
    assert_same_results(*both)
    drawn = [result["token_ids"][0] for result in both[0].results[:5]]
    assert len(set(drawn)) == 5  # a token that was drawn is pushed down


def test_a_plan_may_be_empty() -> None:
    program = logits_program("cpu", random_logits(64, 1.0, seed=2), torch.float32)
    for step in (1, 2):
        plan = build_plan(step, {"closed_slots": [3]})
        program.forward(plan)
        assert read_result(program.sample(plan).wait())["token_ids"].size == 0


def test_a_step_is_sampled_once_and_in_order() -> None:
    program = logits_program("cpu", random_logits(64, 1.0, seed=2), torch.float32)
    plan = build_plan(1, sections_of([Params()], 0, opens=True, top_n=0))
    with pytest.raises(ValueError, match="before its forward pass"):
        program.sample(plan)
    program.forward(plan)
    with pytest.raises(ValueError, match="step 2"):
        program.sample(build_plan(2, {}))
    program.sample(plan)
    with pytest.raises(ValueError, match="before its forward pass"):
        program.sample(plan)
    assert program.page_bytes * SIZES.kv.num_pages == program.pool_bytes
