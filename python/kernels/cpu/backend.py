"""The CPU backend: operations that record, and the program that they become."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from trunkline.kernels.cpu.native import CpuModel, CpuPopulation, cpu_block_kinds
from trunkline.kernels.cpu.recording import LogitsValue, Lowering, PooledValue, Value
from trunkline.kernels.cpu.weights import (
    EmbeddingWeight,
    LinearWeight,
    NormWeight,
    Rotary,
    SinksWeight,
    TiedLinearWeight,
)
from trunkline.kernels.interface import (
    Batch,
    Finished,
    ForwardOutputs,
    IntArray,
    PendingResult,
    ProgramSizes,
)
from trunkline.kernels.specs import (
    ActivationName,
    AttentionSpec,
    ExpertsSpec,
    LinearSpec,
    RotarySpec,
    Weight,
)
from trunkline.plan import Plan

ISA_VARIABLE = "TRUNKLINE_CPU_ISA"  # avx512_bf16, avx2 or portable; default: the best there is
THREADS_VARIABLE = "TRUNKLINE_CPU_THREADS"  # default: what affinity and cgroup allow
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
ACTIVATIONS: dict[ActivationName, int] = {"silu": 0, "gelu_tanh": 1}  # as programs spell them

AnyLinear = LinearWeight | TiedLinearWeight


@dataclass(slots=True)
class RecordedBatch:
    """Stands for any step's batch; collects what the model does with it."""

    values: list[Value] = field(default_factory=list)


class CpuBackend:
    """See `kernels.interface.ProgramBackend`. Bits never depend on batch, chunk, step or threads.

    One backend serves one model: its weights and its program live in one native object.
    """

    name = "cpu"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantization: str = "none"
    ) -> None:
        """Start the kernels' threads.

        Args:
            device: the CPU.
            dtype: bfloat16 or float32.
            quantization: none, int8 or gguf; see `engine.quantization`.

        Raises:
            ValueError: an environment variable has a value that this machine cannot honour.
        """
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self._is_quantised = quantization != "none"
        isa = os.environ.get(ISA_VARIABLE)
        self._model = CpuModel(DTYPES[dtype], isa, _num_threads(), self._is_quantised)
        self._batch: RecordedBatch | None = None

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._model.isa

    @property
    def num_threads(self) -> int:
        """Threads that compute."""
        return self._model.num_threads

    @property
    def block_kinds(self) -> frozenset[str]:
        """See `kernels.interface.BlockBackend`."""
        return frozenset(cpu_block_kinds() if self.quantization == "gguf" else ())

    def create_embedding(
        self, num_embeddings: int, width: int, scale: float = 1.0
    ) -> EmbeddingWeight:
        return EmbeddingWeight(self._model, self.dtype, num_embeddings, width, scale)

    def create_norm(self, width: int, epsilon: float, offset: float = 0.0) -> NormWeight:
        return NormWeight(self._model, self.dtype, width, epsilon, offset)

    def create_linear(self, spec: LinearSpec) -> LinearWeight:
        return LinearWeight(self._model, self.dtype, spec, self._is_quantised)

    def create_tied_linear(self, embedding: EmbeddingWeight) -> TiedLinearWeight:
        return TiedLinearWeight(self._model, embedding)

    def create_sinks(self, num_heads: int) -> SinksWeight:
        return SinksWeight(self._model, self.dtype, num_heads)

    def create_rotary(self, spec: RotarySpec) -> Rotary:
        return Rotary(self._model, spec)

    def create_experts(self, spec: ExpertsSpec) -> Weight:
        raise ValueError("the CPU kernels have no experts; use the torch backend")

    def create_program(
        self, forward: Callable[[Batch], ForwardOutputs], sizes: ProgramSizes
    ) -> CpuProgram:
        batch = RecordedBatch()
        self._batch = batch
        outputs = forward(batch)
        self._batch = None
        logits = outputs.logits
        if not isinstance(logits, LogitsValue) or outputs.hidden is not logits.hidden:
            raise ValueError("the model's logits are not those of its hidden states")
        if outputs.pooled_states != PooledValue(logits.hidden, logits.norm):
            raise ValueError("the model's pooled states are not what its logits are made of")
        program = Lowering(batch.values, logits).program
        kv = sizes.kv
        self._model.start(
            program.buffers,
            program.operations,
            program.head,
            (kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.num_pages, kv.page_size),
            (sizes.num_slots, sizes.max_context_len),
        )
        return CpuProgram(self._model)

    def _record(self, value: Value) -> Value:
        if self._batch is None:
            raise RuntimeError("operations of the CPU backend are recorded by create_program only")
        self._batch.values.append(value)
        return value

    def embed(self, weight: EmbeddingWeight, batch: Batch) -> Value:
        return self._record(Value("embed", weight.width, (), (weight.index,)))

    def rms_norm(self, x: Value, norm: NormWeight) -> Value:
        return self._record(Value("norm", x.width, (x,), (norm.index,)))

    def linear(self, x: Value, weight: AnyLinear) -> Value:
        fusible = self._model.can_fuse_gate(weight.index)
        x = self._ready(x)
        value = Value("linear", weight.out_features, (x,), (weight.index,), fusible)
        return self._record(value)

    def _ready(self, x: Value) -> Value:
        """What linears read."""
        if not self._is_quantised:
            return x
        return self._record(Value("quantise", x.width, (x,)))

    def norm_linear(self, x: Value, norm: NormWeight, weight: AnyLinear) -> Value:
        return self.linear(self.rms_norm(x, norm), weight)

    def gate_up_activation(self, x: Value, activation: ActivationName) -> Value:
        return self._record(Value("gated", x.width // 2, (x,), (ACTIVATIONS[activation],)))

    def linear_add(self, x: Value, weight: AnyLinear, residual: Value) -> Value:
        inputs = (self._ready(x), residual)
        value = Value("linear_add", weight.out_features, inputs, (weight.index,))
        return self._record(value)

    def norm_add(self, x: Value, norm: NormWeight, residual: Value) -> Value:
        return self._record(Value("norm_add", x.width, (x, residual), (norm.index,)))

    def moe(self, x: Value, norm: NormWeight, experts: Weight) -> Value:
        raise ValueError("the CPU kernels have no experts; use the torch backend")

    def attend(self, qkv: Value, spec: AttentionSpec, batch: Batch) -> Value:
        norms = (spec.query_norm, spec.key_norm)
        numbers = (
            spec.layer,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.window,
            _bits(spec.head_dim**-0.5 if spec.scale is None else spec.scale),
            None if spec.soft_cap is None else _bits(spec.soft_cap),
            spec.sinks.index if isinstance(spec.sinks, SinksWeight) else None,
            spec.rotary.index,
            *(norm.index if isinstance(norm, NormWeight) else None for norm in norms),
        )
        return self._record(Value("attend", spec.num_heads * spec.head_dim, (qkv,), numbers))

    def logits(
        self,
        x: Value,
        norm: NormWeight,
        head: AnyLinear,
        batch: Batch,
        soft_cap: float | None = None,
    ) -> LogitsValue:
        cap = None if soft_cap is None else _bits(soft_cap)
        return LogitsValue(x, norm.index, head.index, cap)

    def pooled_states(self, x: Value, norm: NormWeight, batch: Batch) -> PooledValue:
        return PooledValue(x, norm.index)


class CpuProgram:
    """See `kernels.interface.StepProgram`: two calls into the kernels per step."""

    def __init__(self, model: CpuModel) -> None:
        self._model = model

    @property
    def overlap_depth(self) -> int:
        return 0

    @property
    def page_bytes(self) -> int:
        return self._model.page_bytes

    @property
    def pool_bytes(self) -> int:
        return self._model.pool_bytes

    def population(self) -> CpuPopulation:
        return self._model.population()

    def captured_bytes(self, num_rows: int) -> int:
        return 0

    def forward(self, plan: Plan) -> None:
        self._model.forward(plan.arena.data)

    def sample(self, plan: Plan, masks: IntArray | None = None) -> PendingResult:
        words = None if masks is None else np.ascontiguousarray(masks, np.int32).view(np.uint8).data
        return Finished(np.frombuffer(self._model.sample(plan.step, words), np.uint8))


def _bits(number: float) -> int:
    """The bits of a float32: what a recording takes for a float."""
    return int(np.float32(number).view(np.uint32))


def _num_threads() -> int | None:
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError(f"{THREADS_VARIABLE} is {text!r}; use a number of threads from 1 to 1024")
    return int(text)
