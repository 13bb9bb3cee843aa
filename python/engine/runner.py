"""The model runner: executes plans on one device.

It owns everything that lives on the device between steps: weights, KV pool, page tables, last
sampled tokens and the slots' sampling states. It decides nothing; the plan says what to compute.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trunkline.engine.checkpoint import Checkpoint
from trunkline.engine.models.loading import load_model
from trunkline.engine.plan import (
    ADAPTER,
    LOGIT_POOLED,
    ROW_FAILED,
    ROW_NOT_FINITE,
    ROW_OK,
    SOURCE_LAST_SAMPLED,
    Plan,
    encode_result,
)
from trunkline.engine.sampling import SamplingState
from trunkline.kernels import (
    Activation,
    KvSpec,
    PageMove,
    SampleOutputs,
    StepInputs,
    select_backend,
)

IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What a runner needs to know besides the checkpoint. `num_pages` counts page 0."""

    device: str = "cpu"
    dtype: str = "auto"
    backend: str | None = None
    page_size: int = 16
    num_pages: int
    max_running_requests: int
    max_context_len: int
    progress: bool | None = None


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the model takes, in bytes."""

    weight_bytes: int
    page_bytes: int
    pool_bytes: int


@dataclass(slots=True)
class _Step:
    """Between `forward` and `sample` of one plan."""

    step: int
    logits: Activation
    row_errors: IntArray


def resolve_dtype(requested: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in.

    `auto` is the checkpoint's own; float16 becomes float32 on a CPU, which has no fast float16.

    Raises:
        ValueError: a name is unknown.
    """
    name = checkpoint_dtype if requested == "auto" else requested
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    if requested == "auto" and dtype == torch.float16 and device.type == "cpu":
        return torch.float32
    return dtype


class Runner:
    """Loads a model and executes plans, one after another, from one thread at a time."""

    def __init__(self, checkpoint: Checkpoint, options: RunnerOptions) -> None:
        """Load the model and allocate everything.

        Raises:
            CheckpointError: the checkpoint does not fit its config.
            ValueError: an option is out of range.
        """
        config = checkpoint.config
        device = torch.device(options.device)
        self.options = options
        self.config = config
        self.dtype = resolve_dtype(options.dtype, config.dtype, device)
        self.backend = select_backend(device, self.dtype, options.backend)
        with torch.inference_mode():
            self.model = load_model(
                checkpoint, self.backend, options.max_context_len, options.progress
            )
            self._kv = self.backend.allocate_kv(
                KvSpec(
                    num_layers=config.num_layers,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    num_pages=options.num_pages,
                    page_size=options.page_size,
                )
            )
            slots = options.max_running_requests
            self._last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        pages = -(-options.max_context_len // options.page_size)
        self._page_tables = np.zeros((slots, pages), np.int32)
        self._sampling = SamplingState(config.vocab_size)
        self._pending: _Step | None = None

    @property
    def memory(self) -> MemoryFacts:
        """Bytes of weights, of one page and of the whole pool."""
        weights = sum(weight.num_bytes for _, weight in self.model.weights())
        return MemoryFacts(weights, self._kv.page_bytes, self._kv.num_bytes)

    def execute(self, plan: Plan, masks: IntArray | None = None) -> npt.NDArray[np.uint8]:
        """`forward`, then `sample`: a step in one call."""
        self.forward(plan)
        return self.sample(plan, masks)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> None:
        """Apply the plan's records, write KV and compute logits; `sample` must follow.

        Raises:
            ValueError: the plan contradicts the runner's sizes or asks for what it cannot do.
                Nothing has changed then, and the plan may be corrected and executed.
        """
        self._check(plan)
        self._sampling.update(plan)
        self._apply_page_writes(plan)
        self._move_pages(plan)
        token_ids, unknown = self._token_ids(plan)
        batch = self.backend.prepare(
            StepInputs(
                kv=self._kv,
                token_ids=token_ids,
                positions=plan.positions,
                query_lens=plan.row_query_len,
                computed_lens=plan.row_computed_len,
                page_tables=self._page_tables[plan.row_slot],
                logit_tokens=plan.logit_tokens,
            )
        )
        result = self.model.forward(batch)
        errors = np.full(plan.row_slot.size, ROW_OK, np.int32)
        token_row = _token_rows(plan)
        errors[token_row[~self.backend.finite_tokens(result.hidden)]] = ROW_NOT_FINITE
        errors[token_row[unknown]] = ROW_FAILED
        self._pending = _Step(plan.step, result.logits, errors)

    @torch.inference_mode()
    def sample(self, plan: Plan, masks: IntArray | None = None) -> npt.NDArray[np.uint8]:
        """Draw the plan's tokens and encode the step's result.

        Args:
            plan: the plan that `forward` took last.
            masks: grammar masks `[samples, ceil(vocabulary / 32)]`, bit i % 32 of word i / 32 set
                where id i is allowed; read for samples whose slot has a grammar.

        Returns:
            The result block.

        Raises:
            ValueError: `forward` was not called with this plan, or a mask is missing. No slot has
                changed then.
        """
        pending = self._pending
        if pending is None or pending.step != plan.step:
            raise ValueError(f"step {plan.step} is to be sampled before its forward pass")
        inputs = self._sampling.inputs(plan, masks)
        outputs = self.backend.sample(pending.logits, inputs)
        errors = self._row_errors(plan, pending.row_errors, outputs)
        self._sampling.count(plan.sample_slot, outputs.token_ids)
        slots = torch.from_numpy(plan.sample_slot.astype(np.int64)).to(self._last_tokens.device)
        tokens = torch.from_numpy(outputs.token_ids.astype(np.int64)).to(slots.device)
        self._last_tokens.index_copy_(0, slots, tokens)
        self._pending = None
        return encode_result(
            plan.step,
            {
                "sample_counts": np.ones(plan.sample_slot.size, np.int32),
                "token_ids": outputs.token_ids,
                "row_errors": errors if errors.any() else np.zeros(0, np.int32),
                "sampled_logprobs": self._sampled_logprobs(plan, inputs.logprob_rows, outputs),
                "score_logprobs": outputs.score_logprobs,
                "top_ids": outputs.top_ids,
                "top_logprobs": outputs.top_logprobs,
            },
        )

    def _check(self, plan: Plan) -> None:
        options = self.options
        slots = options.max_running_requests
        pages = options.num_pages
        kv_lens = plan.row_computed_len + plan.row_query_len
        moved = plan.page_moves
        checks: tuple[tuple[bool | npt.NDArray[np.bool_], str], ...] = (
            (plan.row_slot.size > 0, "the plan has no rows"),
            (plan.opened_int[:, ADAPTER] == 0, "adapters are not supported"),
            ((plan.logit_flags & LOGIT_POOLED) == 0, "pooled states are not supported"),
            (moved[:, [0, 2, 5]] == 0, "page moves between tiers are not supported"),
            (plan.page_writes[:, 0] == 0, "only cache group 0 exists"),
            (_within(plan.row_slot, 0, slots), f"row slots must be below {slots}"),
            (_within(plan.sample_slot, 0, slots), f"sample slots must be below {slots}"),
            (_within(plan.page_writes[:, 1], 0, slots), f"slots must be below {slots}"),
            (_within(plan.page_writes[:, 3], 1, pages), f"pages must be in 1..{pages}"),
            (_within(moved[:, [1, 3]], 1, pages), f"moved pages must be in 1..{pages}"),
            (_within(moved[:, 4], 0, options.page_size + 1), "a move exceeds its page"),
            (
                _within(plan.page_writes[:, 2], 0, self._page_tables.shape[1]),
                f"page index beyond max_context_len {options.max_context_len}",
            ),
            (
                _within(kv_lens, 1, options.max_context_len + 1),
                f"a row exceeds max_context_len {options.max_context_len}",
            ),
        )
        for fine, message in checks:
            if not np.all(fine):
                raise ValueError(f"step {plan.step}: {message}")

    def _apply_page_writes(self, plan: Plan) -> None:
        slots, indices, pages = (
            plan.page_writes[:, 1],
            plan.page_writes[:, 2],
            plan.page_writes[:, 3],
        )
        self._page_tables[slots, indices] = pages
        rows = np.repeat(plan.row_slot, plan.row_query_len)
        written = self._page_tables[rows, plan.positions // self.options.page_size]
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
            self.backend.move_pages(self._kv, moves)

    def _token_ids(self, plan: Plan) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """The step's input ids on the device, and which of them the vocabulary does not have."""
        unknown = ~_within(plan.token_ids, 0, self.config.vocab_size)
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


def _within(values: IntArray, low: int, high: int) -> npt.NDArray[np.bool_]:
    """Whether values lie in `low..high`, `high` excluded."""
    return (values >= low) & (values < high)


def _token_rows(plan: Plan) -> npt.NDArray[np.int64]:
    """Row of every flat token."""
    return np.repeat(np.arange(plan.row_slot.size), plan.row_query_len)
