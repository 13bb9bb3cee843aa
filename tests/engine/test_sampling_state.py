"""Slots' sampling states: what is opened, counted, suppressed and forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kernels.plan_builder import Opened, Params, build_plan, opened_sections

from trunkline.engine.sampling import SamplingState
from trunkline.kernels import SampleInputs
from trunkline.plan import Plan

PENALTIES = Params(frequency=0.5, presence=0.25, repetition=1.5)


def plan_with(records: list[Opened], closed: list[int] | None = None) -> Plan:
    return build_plan(1, {"closed_slots": closed or [], **opened_sections(records)})


def draw_inputs(
    state: SamplingState, slots: list[int], positions: list[int], masks: np.ndarray | None = None
) -> SampleInputs:
    plan = build_plan(
        2,
        {
            "sample_slot": slots,
            "sample_position": positions,
            "sample_logit": list(range(len(slots))),
            "sample_flags": [0] * len(slots),
            "logit_top_n": [0] * len(slots),
            "score_offsets": [0] * (len(slots) + 1),
        },
    )
    return state.inputs(plan, masks)


def counted(made: SampleInputs) -> dict[tuple[int, int], float]:
    keys = zip(made.counted_rows.tolist(), made.counted_ids.tolist(), strict=True)
    return dict(zip(keys, made.counts.tolist(), strict=True))


def test_outputs_known_at_opening_and_drawn_ones_are_counted() -> None:
    state = SamplingState(100)
    state.update(plan_with([Opened(3, 5, PENALTIES, [7, 8, 7])]))
    state.count(np.array([3], np.int32), np.array([9], np.int32))
    state.count(np.array([3], np.int32), np.array([7], np.int32))
    assert counted(draw_inputs(state, [3], [10])) == {(0, 7): 3, (0, 8): 1, (0, 9): 1}


def test_nothing_is_counted_without_penalties() -> None:
    state = SamplingState(100)
    state.update(plan_with([Opened(0, 5, Params(temperature=1.0), [7])]))
    state.count(np.array([0], np.int32), np.array([9], np.int32))
    assert counted(draw_inputs(state, [0], [7])) == {}


def test_a_slot_reopened_in_one_plan_starts_anew() -> None:
    state = SamplingState(100)
    state.update(plan_with([Opened(0, 5, PENALTIES, [7]), Opened(1, 2, PENALTIES, [4])]))
    state.update(plan_with([Opened(0, 2, Params(presence=1.0, seed=9), [1])], closed=[0]))
    made = draw_inputs(state, [0, 1], [3, 3])
    assert counted(made) == {(0, 1): 1, (1, 4): 1}
    assert made.seed.tolist() == [9, 0]
    assert made.presence_penalty.tolist() == [1.0, 0.25]


def test_the_arena_may_be_overwritten_after_opening() -> None:
    state = SamplingState(100)
    plan = plan_with([Opened(0, 5, Params(frequency=1.0, bias={4: 2.0}, suppressed=[6]), [7])])
    state.update(plan)
    plan.arena[1024:] = 0
    made = draw_inputs(state, [0], [5])
    assert made.frequency_penalty.tolist() == [1.0]
    assert (made.bias_ids.tolist(), made.bias_values.tolist()) == ([4], [2.0])


@pytest.mark.parametrize(("position", "suppressed"), [(5, True), (7, True), (8, False), (9, False)])
def test_min_new_tokens_counts_outputs_not_the_prompt(position: int, suppressed: bool) -> None:
    """Prompt of 5 and 3 tokens at least: the draws at 5, 6 and 7 are outputs 0, 1 and 2."""
    state = SamplingState(100)
    state.update(plan_with([Opened(0, 5, Params(min_new_tokens=3, suppressed=[2, 4]))]))
    made = draw_inputs(state, [0], [position])
    assert made.suppressed_ids.tolist() == ([2, 4] if suppressed else [])


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seeds_keep_their_64_bits(seed: int) -> None:
    state = SamplingState(100)
    state.update(plan_with([Opened(0, 1, Params(seed=seed))]))
    assert int(draw_inputs(state, [0], [1]).seed.view(np.uint64)[0]) == seed


@pytest.mark.parametrize(
    ("params", "outputs", "section"),
    [
        (Params(bias={100: 1.0}), [], "bias_ids"),
        (Params(bias={-1: 1.0}), [], "bias_ids"),
        (Params(suppressed=[100]), [], "suppressed_ids"),
        (PENALTIES, [100], "output_ids"),
    ],
)
def test_ids_outside_the_vocabulary_change_nothing(
    params: Params, outputs: list[int], section: str
) -> None:
    state = SamplingState(100)
    state.update(plan_with([Opened(0, 1, PENALTIES, [3])]))
    with pytest.raises(ValueError, match=section):
        state.update(plan_with([Opened(0, 1, params, outputs)], closed=[0]))
    assert counted(draw_inputs(state, [0], [1])) == {(0, 3): 1}


def test_samples_need_open_slots() -> None:
    state = SamplingState(100)
    state.update(plan_with([Opened(0, 1, Params())]))
    with pytest.raises(ValueError, match=r"slots \[4\]"):
        draw_inputs(state, [0, 4], [1, 1])


def test_grammar_samples_need_masks() -> None:
    state = SamplingState(100)
    state.update(plan_with([Opened(0, 1, Params()), Opened(1, 1, Params(grammar=True))]))
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        draw_inputs(state, [0, 1], [1, 1])
    masks = np.array([[1, 1, 1, 1], [2, 2, 2, 2]], np.int32)
    made = draw_inputs(state, [0, 1], [1, 1], masks)
    assert made.mask_rows.tolist() == [1]
    assert made.masks is not None
    assert made.masks.tolist() == [[2, 2, 2, 2]]
