"""The model runner: executes plans on one device.

It owns the model's weights and the program that computes its steps. It decides nothing; the plan
says what to compute.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from trunkline.engine.checkpoint import Checkpoint
from trunkline.engine.models.loading import load_model
from trunkline.engine.models.registry import needed_operations
from trunkline.engine.operation_program import OperationProgram
from trunkline.kernels import (
    BackendOptions,
    KvSpec,
    PendingResult,
    Population,
    ProgramBackend,
    ProgramSizes,
    StepProgram,
    select_backend,
)
from trunkline.plan import Plan

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
    """What a runner needs to know besides the checkpoint. `num_pages` counts page 0.

    With `is_trial` it is to be resized before it serves: see `ProgramSizes`.
    """

    device: str = "cpu"
    dtype: str = "auto"
    backend: str | None = None
    computation: BackendOptions = field(default_factory=BackendOptions)
    page_size: int = 16
    num_pages: int
    max_running_requests: int
    max_context_len: int
    progress: bool | None = None
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the model takes, in bytes."""

    weight_bytes: int
    page_bytes: int
    pool_bytes: int


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
        self.backend = select_backend(
            device,
            self.dtype,
            options.backend,
            options.computation,
            needs=needed_operations(config),
        )
        with torch.inference_mode():
            self.model = load_model(
                checkpoint, self.backend, options.max_context_len, options.progress
            )
        if options.computation.kv_dtype != "auto":
            logger.info(
                "Keys and values are stored in %s with %s",
                options.computation.kv_dtype,
                "the checkpoint's scales"
                if config.kv_scales
                else "a scale of 1: the checkpoint has none",
            )
        self._program = self._create_program()

    def resize(self, options: RunnerOptions) -> None:
        """Forget every sequence and allocate anew, for other sizes; the weights stay.

        Args:
            options: what the runner was made with, but for `num_pages`, `max_running_requests` and
                `is_trial`.
        """
        del self._program  # its memory is what the new one needs
        self.options = options
        self._program = self._create_program()

    def _create_program(self) -> StepProgram:
        config, options = self.config, self.options
        sizes = ProgramSizes(
            kv=KvSpec(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                num_pages=options.num_pages,
                page_size=options.page_size,
            ),
            num_slots=options.max_running_requests,
            max_context_len=options.max_context_len,
            is_trial=options.is_trial,
        )
        if isinstance(self.backend, ProgramBackend):
            return self.backend.create_program(self.model.forward, sizes)
        return OperationProgram(self.model, self.backend, sizes)

    @property
    def overlap_depth(self) -> int:
        """See `kernels.interface.StepProgram`."""
        return self._program.overlap_depth

    @property
    def memory(self) -> MemoryFacts:
        """Bytes of weights, of one page and of the whole pool."""
        weights = sum(weight.num_bytes for _, weight in self.model.weights())
        return MemoryFacts(weights, self._program.page_bytes, self._program.pool_bytes)

    def population(self) -> Population | None:
        """See `kernels.interface.StepProgram`."""
        return self._program.population()

    def captured_bytes(self, num_rows: int) -> int:
        """See `kernels.interface.StepProgram`."""
        return self._program.captured_bytes(num_rows)

    def execute(self, plan: Plan, masks: IntArray | None = None) -> npt.NDArray[np.uint8]:
        """`forward`, `sample`, and wait: a step in one call."""
        self.forward(plan)
        return self.sample(plan, masks).wait()

    def forward(self, plan: Plan) -> None:
        """Apply the plan's records, write KV and compute logits; `sample` must follow.

        The plan's arena is read until the step's result has been waited for.

        Raises:
            ValueError: the plan contradicts the runner's sizes or asks for what it cannot do.
                Nothing has changed then, and the plan may be corrected and executed.
        """
        if plan.row_slot.size == 0:
            raise ValueError(f"step {plan.step}: the plan has no rows")
        self._program.forward(plan)

    def awaits_earlier(self, plan: Plan) -> bool:
        """See `loop.Executor`: a runner finds the tokens of earlier steps on its device."""
        return False

    def sample(self, plan: Plan, masks: IntArray | None = None) -> PendingResult:
        """Draw the plan's tokens and encode the step's result.

        Args:
            plan: the plan that `forward` took last.
            masks: grammar masks `[samples, ceil(vocabulary / 32)]`, bit i % 32 of word i / 32 set
                where id i is allowed; read for samples whose slot has a grammar, until the result
                has been waited for.

        Returns:
            The result, perhaps before it is there.

        Raises:
            ValueError: `forward` was not called with this plan, or a mask is missing. No slot has
                changed then.
        """
        return self._program.sample(plan, masks)
