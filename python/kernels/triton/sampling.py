"""From logits to tokens and log-probs: which kernels a step's samples need, and their arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import IntArray
from trunkline.kernels.triton.sample import (
    Adjustments,
    Counts,
    Draws,
    Entries,
    LogProbRequest,
    Masks,
    Samples,
    SlotTables,
    draw,
    log_probs,
    note_tokens,
)
from trunkline.kernels.triton.slots import DeviceSlots, SampleNeeds
from trunkline.kernels.triton.staging import StagingArena
from trunkline.plan import Plan

Array = npt.NDArray[Any]
Staged = dict[str, torch.Tensor]

MASK_BYTES = 1 << 20


class Sampler:
    """Draws a step's tokens, and notes them in the slots' tables for the next step."""

    def __init__(self, slots: DeviceSlots, device: torch.device) -> None:
        self._slots = slots
        self._tables = SlotTables(floats=slots.floats, ints=slots.ints, seeds=slots.seeds)
        self._masks = StagingArena(device, MASK_BYTES)

    def draw_plainly(self, logits: torch.Tensor, staged: Staged) -> Staged:
        """Draw where nothing but temperature, top-k, top-p and min-p is wanted; no log-probs.

        Args:
            logits: [samples, vocabulary] float32: sample i is drawn from row i.
            staged: of `decode_arrays`.
        """
        samples = Samples(
            logit_index=staged["sample_logit"],
            slots=staged["sample_slot"],
            positions=staged["sample_position"],
        )
        draws = draw(logits, samples, self._tables)
        note_tokens(draws.token_ids, samples.slots, self._slots.last_tokens, None)
        return _outputs(draws)

    def arrays(self, plan: Plan, needs: SampleNeeds) -> dict[str, Array]:
        """What `draw` needs of a plan, to be staged with the rest of the step."""
        arrays: dict[str, Array] = {
            "drawn_logit": plan.sample_logit,
            "drawn_slot": plan.sample_slot,
            "drawn_position": plan.sample_position,
        }
        if needs.is_adjusted.any():
            arrays["is_adjusted"] = needs.is_adjusted.astype(np.int32)
            if (needs.lanes >= 0).any():
                arrays["lanes"] = needs.lanes
            if needs.grammar_rows.size:
                rows = np.full(plan.sample_slot.size, -1, np.int32)
                rows[needs.grammar_rows] = np.arange(needs.grammar_rows.size)
                arrays["mask_rows"] = rows
            for name, entries in (("bias", needs.bias), ("suppressed", needs.suppressed)):
                if entries.rows.size:
                    arrays |= {f"{name}_rows": entries.rows, f"{name}_ids": entries.ids}
            if needs.bias.rows.size:
                arrays["bias_values"] = needs.bias.values
        if needs.wants_logprobs:
            arrays |= _logprob_arrays(plan, needs)
        return arrays

    def draw(
        self,
        logits: torch.Tensor,
        plan: Plan,
        needs: SampleNeeds,
        staged: Staged,
        masks: IntArray | None,
    ) -> Staged:
        """Draw whatever a plan's samples need, with the log-probs that it wants.

        Args:
            logits: [logits, vocabulary] float32; further rows are left alone.
            plan: the step.
            needs: of its samples.
            staged: of `arrays`.
            masks: `[samples, words]`; rows of samples without a grammar are not read.
        """
        logits = logits[: plan.logit_tokens.size]
        samples = Samples(
            logit_index=staged["drawn_logit"],
            slots=staged["drawn_slot"],
            positions=staged["drawn_position"],
        )
        counts = None
        if "lanes" in staged:
            counts = Counts(lanes=staged["lanes"], table=self._slots.counts)
        adjustments = self._adjustments(needs, staged, counts, masks)
        draws = draw(
            logits,
            samples,
            self._tables,
            adjustments,
            is_greedy=needs.is_greedy,
            cuts=needs.has_cuts,
        )
        note_tokens(draws.token_ids, samples.slots, self._slots.last_tokens, counts)
        outputs = _outputs(draws)
        if needs.wants_logprobs:
            found = log_probs(draws, samples.logit_index, _request(plan, staged))
            for name, values in (
                ("sampled_logprobs", found.sampled),
                ("score_logprobs", found.scored),
                ("top_ids", found.top_ids),
                ("top_logprobs", found.top_values),
            ):
                if values is not None:
                    outputs[name] = values
        return outputs

    def _adjustments(
        self,
        needs: SampleNeeds,
        staged: Staged,
        counts: Counts | None,
        masks: IntArray | None,
    ) -> Adjustments | None:
        if "is_adjusted" not in staged:
            return None
        words = None
        if needs.grammar_rows.size:
            assert masks is not None, "the program checks that there are masks"
            words = self._masks.stage({"words": masks[needs.grammar_rows]})["words"]
        return Adjustments(
            is_adjusted=staged["is_adjusted"],
            counts=counts,
            masks=None if words is None else Masks(rows=staged["mask_rows"], words=words),
            bias=_entries(staged, "bias"),
            suppressed=_entries(staged, "suppressed"),
        )


def _entries(staged: Staged, name: str) -> Entries | None:
    if f"{name}_rows" not in staged:
        return None
    return Entries(
        rows=staged[f"{name}_rows"],
        ids=staged[f"{name}_ids"],
        values=staged.get(f"{name}_values"),
    )


def _logprob_arrays(plan: Plan, needs: SampleNeeds) -> dict[str, Array]:
    num_scores = np.diff(plan.score_offsets)
    wanted = (plan.logit_top_n > 0) | (num_scores > 0)
    wanted[plan.sample_logit[needs.logprob_rows]] = True
    arrays: dict[str, Array] = {"wanted_logits": wanted.astype(np.int32)}
    if plan.logit_top_n.any():
        arrays["top_n"] = plan.logit_top_n
    if plan.score_ids.size:
        arrays["score_rows"] = np.repeat(np.arange(wanted.size, dtype=np.int32), num_scores)
        arrays["score_ids"] = plan.score_ids
    if needs.processed_rows.size:
        processed = np.full(wanted.size, -1, np.int32)
        processed[plan.sample_logit[needs.processed_rows]] = needs.processed_rows
        arrays["processed_sample"] = processed
    return arrays


def _request(plan: Plan, staged: Staged) -> LogProbRequest:
    return LogProbRequest(
        is_wanted=staged["wanted_logits"],
        top_n=staged.get("top_n"),
        max_top_n=int(plan.logit_top_n.max(initial=0)),
        score_rows=staged.get("score_rows"),
        score_ids=staged.get("score_ids"),
        processed_sample=staged.get("processed_sample"),
    )


def _outputs(draws: Draws) -> Staged:
    return {
        "token_ids": draws.token_ids,
        "possible": draws.sample_possible,
        "logit_finite": draws.logit_finite,
    }
