"""Executing plans operation by operation, for backends that do not execute whole steps themselves.

It owns what lives on the device between steps: KV pool, page tables, last sampled tokens and the
slots' sampling states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trunkline.engine.models.registry import Model
from trunkline.engine.sampling import SamplingState
from trunkline.kernels import (
    Activation,
    Finished,
    PageMove,
    PendingResult,
    ProgramSizes,
    SampleOutputs,
    StepInputs,
    StepwiseBackend,
)
from trunkline.kernels.plan_checks import check_plan, within
from trunkline.plan import (
    LOGIT_POOLED,
    ROW_FAILED,
    ROW_NOT_FINITE,
    ROW_OK,
    SOURCE_LAST_SAMPLED,
    Plan,
    encode_result,
)

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Step:
    """Between `forward` and `sample` of one plan."""

    step: int
    logits: Activation
    pooled_states: npt.NDArray[np.float32]
    row_errors: IntArray


class OperationProgram:
    """See `kernels.interface.StepProgram`: one call of the backend per operation."""

    def __init__(self, model: Model, backend: StepwiseBackend, sizes: ProgramSizes) -> None:
        self._model = model
        self._backend = backend
        self._sizes = sizes
        with torch.inference_mode():
            self._kv = backend.allocate_kv(sizes.kv)
            slots = sizes.num_slots
            self._last_tokens = torch.zeros(slots, dtype=torch.int64, device=backend.device)
        pages = -(-sizes.max_context_len // sizes.kv.page_size)
        self._page_tables = np.zeros((slots, pages), np.int32)
        self._sampling = SamplingState(model.config.vocab_size)
        self._pending: _Step | None = None

    @property
    def overlap_depth(self) -> int:
        return 0

    @property
    def page_bytes(self) -> int:
        return self._kv.page_bytes

    @property
    def pool_bytes(self) -> int:
        return self._kv.num_bytes

    def population(self) -> None:
        return None

    def captured_bytes(self, num_rows: int) -> int:
        return 0

    @torch.inference_mode()
    def forward(self, plan: Plan) -> None:
        check_plan(plan, self._sizes)
        self._sampling.update(plan)
        self._apply_page_writes(plan)
        self._move_pages(plan)
        token_ids, unknown = self._token_ids(plan)
        batch = self._backend.prepare(
            StepInputs(
                kv=self._kv,
                token_ids=token_ids,
                positions=plan.positions,
                query_lens=plan.row_query_len,
                computed_lens=plan.row_computed_len,
                page_tables=self._page_tables[plan.row_slot],
                logit_tokens=plan.logit_tokens,
                pooled_tokens=plan.logit_tokens[(plan.logit_flags & LOGIT_POOLED) != 0],
            )
        )
        result = self._model.forward(batch)
        pooled = result.pooled_states.cpu().numpy()
        errors = np.full(plan.row_slot.size, ROW_OK, np.int32)
        token_row = _token_rows(plan)
        errors[token_row[~self._backend.finite_tokens(result.hidden)]] = ROW_NOT_FINITE
        errors[token_row[unknown]] = ROW_FAILED
        self._pending = _Step(plan.step, result.logits, pooled, errors)

    @torch.inference_mode()
    def sample(self, plan: Plan, masks: IntArray | None = None) -> PendingResult:
        pending = self._pending
        if pending is None or pending.step != plan.step:
            raise ValueError(f"step {plan.step} is to be sampled before its forward pass")
        inputs = self._sampling.inputs(plan, masks)
        outputs = self._backend.sample(pending.logits, inputs)
        errors = self._row_errors(plan, pending.row_errors, outputs)
        self._sampling.count(plan.sample_slot, outputs.token_ids)
        slots = torch.from_numpy(plan.sample_slot.astype(np.int64)).to(self._last_tokens.device)
        tokens = torch.from_numpy(outputs.token_ids.astype(np.int64)).to(slots.device)
        self._last_tokens.index_copy_(0, slots, tokens)
        self._pending = None
        block = encode_result(
            plan.step,
            {
                "sample_counts": np.ones(plan.sample_slot.size, np.int32),
                "token_ids": outputs.token_ids,
                "row_errors": errors if errors.any() else np.zeros(0, np.int32),
                "sampled_logprobs": self._sampled_logprobs(plan, inputs.logprob_rows, outputs),
                "score_logprobs": outputs.score_logprobs,
                "top_ids": outputs.top_ids,
                "top_logprobs": outputs.top_logprobs,
                "pooled_states": pending.pooled_states,
            },
        )
        return Finished(block)

    def _apply_page_writes(self, plan: Plan) -> None:
        slots, indices, pages = (
            plan.page_writes[:, 1],
            plan.page_writes[:, 2],
            plan.page_writes[:, 3],
        )
        self._page_tables[slots, indices] = pages
        rows = np.repeat(plan.row_slot, plan.row_query_len)
        written = self._page_tables[rows, plan.positions // self._sizes.kv.page_size]
        if not written.all():
            slot = int(rows[written == 0][0])
            raise ValueError(f"step {plan.step}: slot {slot} has no page for a token it computes")

    def _move_pages(self, plan: Plan) -> None:
        moves = [
            PageMove(source, destination, tokens)
            for _, source, _, destination, tokens, _ in plan.page_moves.tolist()
            if tokens > 0
        ]
        if moves:
            self._backend.move_pages(self._kv, moves)

    def _token_ids(self, plan: Plan) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """The step's input ids on the device, and which of them the vocabulary does not have."""
        unknown = ~within(plan.token_ids, 0, self._model.config.vocab_size)
        ids = np.where(unknown, 0, plan.token_ids).astype(np.int64)
        token_ids = torch.from_numpy(ids).to(self._last_tokens.device)
        from_device = np.flatnonzero(plan.row_token_source == SOURCE_LAST_SAMPLED)
        if from_device.size:
            last = np.cumsum(plan.row_query_len)[from_device] - 1
            slots = plan.row_slot[from_device].astype(np.int64)
            device = token_ids.device
            sampled = self._last_tokens[torch.from_numpy(slots).to(device)]
            token_ids[torch.from_numpy(last.astype(np.int64)).to(device)] = sampled
        return token_ids, unknown

    def _row_errors(self, plan: Plan, forward: IntArray, outputs: SampleOutputs) -> IntArray:
        errors = forward.copy()
        logit_row = _token_rows(plan)[plan.logit_tokens]
        impossible = logit_row[plan.sample_logit[~outputs.sample_possible]]
        errors[impossible] = np.maximum(errors[impossible], ROW_FAILED)
        errors[logit_row[~outputs.logit_finite]] = ROW_NOT_FINITE
        return errors

    def _sampled_logprobs(
        self, plan: Plan, rows: IntArray, outputs: SampleOutputs
    ) -> npt.NDArray[np.float32]:
        if rows.size == 0:
            return np.zeros(0, np.float32)
        values = np.zeros(plan.sample_slot.size, np.float32)
        values[rows] = outputs.sampled_logprobs
        return values


def _token_rows(plan: Plan) -> npt.NDArray[np.int64]:
    """Row of every flat token."""
    return np.repeat(np.arange(plan.row_slot.size), plan.row_query_len)
