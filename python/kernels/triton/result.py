"""The result of a step that the device may still be at work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trunkline.kernels.interface import IntArray
from trunkline.kernels.triton.staging import Readback
from trunkline.kernels.triton.step_arrays import token_rows
from trunkline.plan import ROW_FAILED, ROW_NOT_FINITE, ROW_OK, SAMPLE_LOGPROB, Plan, encode_result

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """See `kernels.interface.PendingResult`.

    The arrays that are read back (those of padding rows come last and are left out):
    `token_finite` [tokens] bool; with samples `token_ids` [samples] int32, `possible` [samples] and
    `logit_finite` [logits]; where asked for, `sampled_logprobs` [samples], `score_logprobs`,
    `top_ids` and `top_logprobs` [logits, most], and `pooled` [pooled, width], all float32.
    """

    plan: Plan
    known: npt.NDArray[np.bool_]  # [tokens] the vocabulary has the token's id
    readback: Readback

    def wait(self) -> npt.NDArray[np.uint8]:
        plan = self.plan
        arrays = self.readback.wait()
        errors = self._row_errors(arrays)
        sections: dict[str, Array] = {
            "sample_counts": np.ones(plan.sample_slot.size, np.int32),
            "token_ids": arrays["token_ids"][: plan.sample_slot.size],
            "row_errors": errors if errors.any() else np.zeros(0, np.int32),
        }
        for name, source in (("pooled_states", "pooled"), ("score_logprobs", "score_logprobs")):
            if source in arrays:
                sections[name] = arrays[source]
        asked = (plan.sample_flags & SAMPLE_LOGPROB) != 0
        if asked.any():
            sections["sampled_logprobs"] = np.where(asked, arrays["sampled_logprobs"], 0.0)
        if "top_ids" in arrays:
            kept = np.arange(arrays["top_ids"].shape[1]) < plan.logit_top_n[:, None]
            sections["top_ids"] = arrays["top_ids"][kept]
            sections["top_logprobs"] = arrays["top_logprobs"][kept]
        return encode_result(plan.step, sections)

    def _row_errors(self, arrays: dict[str, Array]) -> IntArray:
        plan = self.plan
        errors = np.full(plan.row_slot.size, ROW_OK, np.int32)
        token_row = token_rows(plan)
        errors[token_row[~arrays["token_finite"][: plan.token_ids.size]]] = ROW_NOT_FINITE
        errors[token_row[~self.known]] = ROW_FAILED
        logit_row = token_row[plan.logit_tokens]
        possible = arrays["possible"][: plan.sample_slot.size].astype(np.bool_)
        impossible = logit_row[plan.sample_logit[~possible]]
        errors[impossible] = np.maximum(errors[impossible], ROW_FAILED)
        finite = arrays["logit_finite"][: plan.logit_tokens.size].astype(np.bool_)
        errors[logit_row[~finite]] = ROW_NOT_FINITE
        return errors
