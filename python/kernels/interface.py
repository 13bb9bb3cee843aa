"""The vocabulary of operations that models are written in, and what passes through it.

A model holds weight handles and calls operations; it never computes on activations itself. So a
backend may fuse, quantise, shard, or record a model's operations once and replay them natively.
This module knows no backend and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.specs import (
    ActivationName,
    AttentionSpec,
    ExpertsSpec,
    KvSpec,
    LinearSpec,
    RotarySpec,
    Weight,
)

if TYPE_CHECKING:
    from trunkline.plan import Plan

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]

# Opaque to models and runner: each backend has its own.
Activation: TypeAlias = Any
Batch: TypeAlias = Any

# A `Weight` (or `KvPool`) that the same backend created: operations may rely on its own class.
OwnWeight: TypeAlias = Any
OwnKvPool: TypeAlias = Any


class KvPool(Protocol):
    """Keys and values of all layers, in the backend's own layout."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What one forward pass computes: rows of scheduled tokens, flat, one row after another."""

    kv: Any  # of `Backend.allocate_kv`
    token_ids: torch.Tensor  # [tokens] int64, device
    positions: IntArray  # [tokens]
    query_lens: IntArray  # [rows]
    computed_lens: IntArray  # [rows]
    page_tables: IntArray  # [rows, pages]; entries beyond a row's length are arbitrary
    logit_tokens: IntArray  # [logits] flat token indices
    pooled_tokens: IntArray  # [pooled] those of them whose pooled state is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInputs:
    """One step's sampling: S samples, drawn from L logit positions over a vocabulary of V.

    Sparse lists name the sample first: entry e changes logit `ids[e]` of sample `rows[e]`.
    """

    logit_index: IntArray  # [S] logit position
    temperature: FloatArray  # [S] 0 = greedy
    top_p: FloatArray
    min_p: FloatArray
    top_k: IntArray  # 0 = all
    seed: npt.NDArray[np.int64]  # the 64 bits of the Philox key
    position: IntArray  # absolute position of the new token

    counted_rows: IntArray  # output tokens of samples with penalties, each id once per sample
    counted_ids: IntArray
    counts: FloatArray
    frequency_penalty: FloatArray  # [S]
    presence_penalty: FloatArray
    repetition_penalty: FloatArray
    suppressed_rows: IntArray  # ids held at -inf
    suppressed_ids: IntArray
    bias_rows: IntArray
    bias_ids: IntArray
    bias_values: FloatArray
    masks: IntArray | None = None  # [masked samples, ceil(V / 32)]; bit i % 32 of word i / 32
    mask_rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    # Samples whose log-probs are those of the adjusted logits divided by the temperature, before
    # anything is cut; no other sample shares their logit position.
    processed_rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprob_rows: IntArray  # samples whose token's log-prob is wanted
    top_n: IntArray  # [L]
    score_offsets: IntArray  # [L + 1]
    score_ids: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutputs:
    """Those of failed entries mean nothing, and are no NaN.

    A log-prob is -inf only for an id that a processed sample cannot draw.
    """

    token_ids: IntArray  # [S]
    logit_finite: npt.NDArray[np.bool_]  # [L] all raw logits there are finite
    sample_possible: npt.NDArray[np.bool_]  # [S] a token was left after masks and suppression
    sampled_logprobs: FloatArray  # by logprob_rows
    score_logprobs: FloatArray  # by score_ids
    top_ids: IntArray  # flat, top_n[l] each, best first, lower id first among equals
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class PageMove:
    """Copy the KV of the first `num_tokens` positions of a page, all layers."""

    source: int
    destination: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSizes:
    """Sizes of what a program keeps between steps.

    With `is_trial` it only shows how much memory a step takes: nothing is captured ahead.
    """

    kv: KvSpec
    num_slots: int
    max_context_len: int
    is_trial: bool = False


class OptionError(ValueError):
    """A backend lacks what an option asks for, here or at all; the message says what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What a user may choose about how a backend computes; one that cannot do it refuses it.

    Attributes:
        attention: kernels that attend: auto, flashinfer, triton.
        kv_dtype: how keys and values are stored: auto (as activations are), fp8_e4m3.
        quantization: of weights, when they are loaded: none, int8, gguf or fp8, as
            `engine.quantization` explains them.
        deterministic: bits never depend on batch, chunk or step. Backends of which that is always
            true take either value.
        max_graph_batch: rows of the largest decode step that is captured as a CUDA graph; 0: none
            is. It changes no result.
    """

    attention: str = "auto"
    kv_dtype: str = "auto"
    quantization: str = "none"
    deterministic: bool = False
    max_graph_batch: int = 0


class ForwardOutputs(Protocol):
    """What a model's forward pass yields."""

    @property
    def hidden(self) -> Activation:
        """Final hidden states of all tokens, before the last norm."""

    @property
    def logits(self) -> Activation:
        """Logits at the batch's logit tokens."""

    @property
    def pooled_states(self) -> Activation:
        """What a pooled request is answered with."""


class PendingResult(Protocol):
    """The result of a step that was launched; the device may still be at work on it."""

    def wait(self) -> npt.NDArray[np.uint8]:
        """The block of `plan.encode_result`, once the step is done; called once.

        Raises:
            Exception: the step failed as a whole, wherever it was.
        """


@dataclass(frozen=True, slots=True)
class Finished:
    """The `PendingResult` of a program that is done with a step when its call returns."""

    block: npt.NDArray[np.uint8]

    def wait(self) -> npt.NDArray[np.uint8]:
        return self.block


class Population(Protocol):
    """Memory of a KV pool that is reserved, but only taken when it is first written."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""

    @property
    def bytes_ahead(self) -> int:
        """Bytes taken beyond all pages that were written."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last step, 0 while one runs; infinite before the first."""

    def advance(self, num_bytes: int) -> bool:
        """Take about so many bytes more before they are written.

        Steps that run meanwhile may be held up: the host of a virtual machine stops a processor
        while it finds memory for it.

        To be called from any thread, one at a time.

        Returns:
            False if nothing is left to take: all is there, or the program is gone.

        Raises:
            OSError: the system refuses, or cannot do it.
        """


class StepProgram(Protocol):
    """Whole steps of one model, with everything that lives between them.

    `forward` and `sample` are called in turns from one thread, and may return before the device is
    done. Calls take effect in their order: a `forward` sees the tokens that the `sample` before it
    draws. A plan's arena and masks stay as they are until the step's result is waited for, or a
    call has failed; after that nothing reads them.
    Where a step fails after others were launched behind it, their results fail as well, unless all
    that its plan says of slots and pages was done.
    """

    @property
    def overlap_depth(self) -> int:
        """Steps that may be launched while the oldest one's result has not been waited for.

        0: nothing is gained by more, because calls return when their work is done.
        """

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page over all layers."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool."""

    def population(self) -> Population | None:
        """The pool's memory, to be taken ahead; None: allocating it took it, or nothing can."""

    def captured_bytes(self, num_rows: int) -> int:
        """What attention keeps for captured decode steps, if the largest had `num_rows` rows.

        To be asked once a step has run.
        """

    def forward(self, plan: Plan) -> None:
        """See `engine.runner.Runner.forward`."""

    def sample(self, plan: Plan, masks: IntArray | None = None) -> PendingResult:
        """See `engine.runner.Runner.sample`."""


class Backend(Protocol):
    """The operations, for one device and dtype.

    A token's activations have the same bits whatever else is in the batch and however its row is
    split into steps; `docs/architecture.md` says for which backends.
    """

    name: str
    device: torch.device
    dtype: torch.dtype

    def create_embedding(self, num_embeddings: int, width: int, scale: float = 1.0) -> Weight:
        """Handle of a token embedding whose rows `embed` multiplies by `scale`.

        Its part is `weight`, which is not scaled; nor is a tied linear.
        """

    def create_norm(self, width: int, epsilon: float, offset: float = 0.0) -> Weight:
        """Handle of an RMS norm over the last `width` elements; its part is `weight`.

        The norm multiplies by `weight + offset`, a sum in float32 that is not rounded further.
        """

    def create_linear(self, spec: LinearSpec) -> Weight:
        """Handle of a linear; its parts are `name.weight` and `name.bias` of the spec's parts."""

    def create_tied_linear(self, embedding: OwnWeight) -> Weight:
        """Handle of a linear over the embedding's own table; it has no parts."""

    def create_sinks(self, num_heads: int) -> Weight:
        """Handle of attention sinks, one score per head; its part is `sinks`."""

    def create_experts(self, spec: ExpertsSpec) -> Weight:
        """Handle of a router and its experts; its parts are the spec's `shapes`."""

    def create_rotary(self, spec: RotarySpec) -> Any:
        """Handle of a rotary encoding."""

    def embed(self, weight: OwnWeight, batch: Batch) -> Activation:
        """Look up the batch's tokens."""

    def rms_norm(self, x: Activation, norm: OwnWeight) -> Activation:
        """`x / rms(x) * weight`, reduced in float32."""

    def linear(self, x: Activation, weight: OwnWeight) -> Activation:
        """`x W^T + b`."""

    def norm_linear(self, x: Activation, norm: OwnWeight, weight: OwnWeight) -> Activation:
        """`linear(rms_norm(x))`."""

    def gate_up_activation(self, x: Activation, activation: ActivationName) -> Activation:
        """`act(gate) * up` of `[gate | up]`."""

    def linear_add(self, x: Activation, weight: OwnWeight, residual: Activation) -> Activation:
        """`residual + linear(x)`; `residual` may be overwritten and must not be used again."""

    def norm_add(self, x: Activation, norm: OwnWeight, residual: Activation) -> Activation:
        """`residual + rms_norm(x)` in float32, of what `linear` yields.

        `residual` may be overwritten and must not be used again.
        """

    def moe(self, x: Activation, norm: OwnWeight, experts: OwnWeight) -> Activation:
        """`x` plus the results of each token's experts for `rms_norm(x)`, times their shares.

        Shares are the softmax over all experts in float32; a token goes to the `top_k` largest,
        the lower expert among equals, and their results are added in that order. `x` may be
        overwritten and must not be used again.
        """

    def attend(self, qkv: Activation, spec: AttentionSpec, batch: Batch) -> Activation:
        """Attention of `[query | key | value]`.

        Norms queries and keys (where the spec says so), turns them, writes keys and values to the
        rows' pages and attends causally over everything that the rows then have.
        """

    def logits(
        self,
        x: Activation,
        norm: OwnWeight,
        head: OwnWeight,
        batch: Batch,
        soft_cap: float | None = None,
    ) -> Activation:
        """Logits at the batch's logit tokens, in float32: not rounded to the dtype.

        With a soft cap, which is above 0, they are `cap * tanh(logit / cap)`: all that is drawn
        from them and said of them is of the capped ones.
        """

    def pooled_states(self, x: Activation, norm: OwnWeight, batch: Batch) -> Activation:
        """`rms_norm(x)` of the tokens whose pooled state is wanted, in float32.

        A backend that records takes it only of the `x` and `norm` of `logits`.
        """


@runtime_checkable
class BlockBackend(Protocol):
    """A backend whose embeddings and linears take tensors as they are stored, too."""

    @property
    def block_kinds(self) -> frozenset[str]:
        """Types for which `Weight.load` takes a `BlockTensor` as a weight."""


class StepwiseBackend(Backend, Protocol):
    """A backend that computes an operation when it is called."""

    def allocate_kv(self, spec: KvSpec) -> KvPool:
        """Allocate a pool."""

    def prepare(self, step: StepInputs) -> Batch:
        """Whatever the operations of one forward pass share."""

    def finite_tokens(self, x: Activation) -> npt.NDArray[np.bool_]:
        """Which of the batch's tokens have only finite elements."""

    def sample(self, logits: Activation, inputs: SampleInputs) -> SampleOutputs:
        """Draw tokens and compute log-probs.

        Order: frequency and presence penalty, suppression, repetition penalty, mask, bias,
        temperature, top-k, top-p, min-p, draw. Log-probs are of the raw logits.
        """

    def move_pages(self, kv: OwnKvPool, moves: list[PageMove]) -> None:
        """Copy pages; no page is source and destination in one call."""


@runtime_checkable
class ProgramBackend(Backend, Protocol):
    """A backend that records a model's operations once and then executes whole steps."""

    def create_program(
        self, forward: Callable[[Batch], ForwardOutputs], sizes: ProgramSizes
    ) -> StepProgram:
        """Record a model.

        Args:
            forward: the model's forward pass, called once with a batch that means nothing.
            sizes: of pool, page tables and slots.

        Raises:
            ValueError: the backend cannot compute what the model does, or not at these sizes.
        """
