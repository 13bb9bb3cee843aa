"""The reference backend: the vocabulary of operations in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import PageMove, SampleInputs, SampleOutputs, StepInputs
from trunkline.kernels.specs import (
    ActivationName,
    AttentionSpec,
    ExpertsSpec,
    KvSpec,
    LinearSpec,
    RotarySpec,
    Weight,
)
from trunkline.kernels.tensor_weights import NormWeight, SinksWeight
from trunkline.kernels.torch_reference.attention import AttentionKernel, cap_softly
from trunkline.kernels.torch_reference.attention_plan import BLOCK, AttentionPlan
from trunkline.kernels.torch_reference.experts import ExpertsWeight, by_expert, route
from trunkline.kernels.torch_reference.kv_pool import TorchKvPool
from trunkline.kernels.torch_reference.sampler import sample
from trunkline.kernels.torch_reference.tiling import tiled_product
from trunkline.kernels.torch_reference.weights import (
    EmbeddingWeight,
    HeightCache,
    LinearWeight,
    Rotary,
    TiedLinearWeight,
)

ACTIVATION_ELEMENTS = 1 << 17  # elements that a pointwise chain handles at once, in cache
# gelu by tanh is 0.5 x (1 + tanh(scale * (x + cubic * x^3))).
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715

AnyLinear = LinearWeight | TiedLinearWeight


@dataclass(slots=True)
class TorchBatch:
    """One step's shared tensors; the lazily built ones serve all layers."""

    step: StepInputs
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tokens] int64: where the tokens' KV goes
    logit_tokens: torch.Tensor  # [logits] int64
    pooled_tokens: torch.Tensor  # [pooled] int64
    plans: dict[int | None, AttentionPlan] = field(default_factory=dict)
    turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def plan(self, spec: AttentionSpec, kernel: AttentionKernel) -> AttentionPlan:
        """The tiles for the spec's window."""
        if spec.window not in self.plans:
            self.plans[spec.window] = AttentionPlan(self.step, spec.window, kernel.heads)
        return self.plans[spec.window]

    def turn(self, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of the tokens' positions, [tokens, 1, rotary_dim / 2]."""
        if id(rotary) not in self.turns:
            cos = rotary.cos.index_select(0, self.positions).unsqueeze(1)
            sin = rotary.sin.index_select(0, self.positions).unsqueeze(1)
            self.turns[id(rotary)] = (cos, sin)
        return self.turns[id(rotary)]


class TorchBackend:
    """See `kernels.interface.Backend`. Bits never depend on batch, chunk or step."""

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._like = torch.empty(0, device=device, dtype=dtype)
        self._heights: HeightCache = {}
        self._kernels: dict[tuple[int, int, int], AttentionKernel] = {}

    def create_embedding(
        self, num_embeddings: int, width: int, scale: float = 1.0
    ) -> EmbeddingWeight:
        return EmbeddingWeight(num_embeddings, width, self._like, scale)

    def create_norm(self, width: int, epsilon: float, offset: float = 0.0) -> NormWeight:
        return NormWeight(width, epsilon, self._like, offset)

    def create_linear(self, spec: LinearSpec) -> LinearWeight:
        return LinearWeight(spec, self._like, self._heights)

    def create_tied_linear(self, embedding: Weight) -> TiedLinearWeight:
        assert isinstance(embedding, EmbeddingWeight)
        return TiedLinearWeight(embedding, self._heights)

    def create_sinks(self, num_heads: int) -> SinksWeight:
        return SinksWeight(num_heads, self._like)

    def create_experts(self, spec: ExpertsSpec) -> ExpertsWeight:
        return ExpertsWeight(spec, self._like, self._heights)

    def create_rotary(self, spec: RotarySpec) -> Rotary:
        return Rotary(spec, self.device)

    def allocate_kv(self, spec: KvSpec) -> TorchKvPool:
        if BLOCK % spec.page_size != 0:
            raise ValueError(
                f"page_size {spec.page_size} does not divide {BLOCK}; the torch backend takes "
                "powers of two up to that"
            )
        return TorchKvPool(spec, self.dtype, self.device)

    def move_pages(self, kv: TorchKvPool, moves: list[PageMove]) -> None:
        kv.move(moves)

    def prepare(self, step: StepInputs) -> TorchBatch:
        size = step.kv.spec.page_size
        rows = np.repeat(np.arange(step.query_lens.size), step.query_lens)
        pages = step.page_tables[rows, step.positions // size].astype(np.int64)
        return TorchBatch(
            step=step,
            positions=self._index(step.positions),
            slots=self._index(pages * size + step.positions % size),
            logit_tokens=self._index(step.logit_tokens),
            pooled_tokens=self._index(step.pooled_tokens),
        )

    def _index(self, array: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def embed(self, weight: EmbeddingWeight, batch: TorchBatch) -> torch.Tensor:
        """The residual stream is float32: rounding it at every layer would cost accuracy."""
        rows = weight.table.index_select(0, batch.step.token_ids).float()
        return rows if weight.scale == 1.0 else rows.mul_(weight.scale)

    def rms_norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        return self._wide_norm(x, norm).to(self.dtype)

    def _wide_norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        return (x * _inverse_rms(x, norm.epsilon)).mul_(norm.weight)

    def linear(self, x: torch.Tensor, weight: AnyLinear) -> torch.Tensor:
        product, heights = weight.product()
        return tiled_product(product, x, heights)

    def norm_linear(self, x: torch.Tensor, norm: NormWeight, weight: AnyLinear) -> torch.Tensor:
        return self.linear(self.rms_norm(x, norm), weight)

    def gate_up_activation(self, x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
        width = x.shape[1] // 2
        result = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
        step = max(1, ACTIVATION_ELEMENTS // width)
        for part, out in zip(torch.split(x, step), torch.split(result, step), strict=True):
            gate = part[:, :width].to(torch.float32, copy=True)
            # torch's own silu and tanh round differently at the end of a thread's share; exp does
            # not.
            gate /= _negated_exponent(gate, activation).exp_().add_(1.0)
            torch.mul(gate.to(x.dtype), part[:, width:], out=out)
        return result

    def linear_add(
        self, x: torch.Tensor, weight: AnyLinear, residual: torch.Tensor
    ) -> torch.Tensor:
        return residual.add_(self.linear(x, weight).float())

    def norm_add(self, x: torch.Tensor, norm: NormWeight, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self._wide_norm(x.float(), norm))

    def moe(self, x: torch.Tensor, norm: NormWeight, experts: ExpertsWeight) -> torch.Tensor:
        normed = self.rms_norm(x, norm)
        product, heights = experts.router.product(wide=True)
        spec = experts.spec
        chosen, shares = route(tiled_product(product, normed, heights), spec)
        results = torch.empty((chosen.numel(), x.shape[1]), dtype=torch.float32, device=x.device)
        for expert, pairs in by_expert(chosen):
            tokens = normed.index_select(0, pairs // spec.top_k)
            gate_up = self.linear(tokens, experts.gate_ups[expert])
            activated = self.gate_up_activation(gate_up, spec.activation)
            results[pairs] = self.linear(activated, experts.downs[expert]).float()
        parts = results.view(x.shape[0], spec.top_k, x.shape[1]).mul_(shares[:, :, None])
        total = parts[:, 0].clone()
        for choice in range(1, spec.top_k):
            total += parts[:, choice]
        return x.add_(total)

    def attend(self, qkv: torch.Tensor, spec: AttentionSpec, batch: TorchBatch) -> torch.Tensor:
        kernel = self._kernel(spec)
        num_tokens = qkv.shape[0]
        num_turned = spec.num_heads + spec.num_kv_heads
        heads = qkv.view(num_tokens, num_turned + spec.num_kv_heads, spec.head_dim)
        turned = heads[:, :num_turned].to(torch.float32, copy=True)
        query, key = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        for part, norm in ((query, spec.query_norm), (key, spec.key_norm)):
            if norm is not None:
                assert isinstance(norm, NormWeight)
                part *= _inverse_rms(part.contiguous(), norm.epsilon)
                part *= norm.weight
        _turn(turned, *batch.turn(spec.rotary))
        pool: TorchKvPool = batch.step.kv
        pool.write(spec.layer, batch.slots, (key.to(self.dtype), heads[:, num_turned:]))
        scaled = query * (spec.head_dim**-0.5 if spec.scale is None else spec.scale)
        return kernel.attend(scaled, batch.plan(spec, kernel), pool, spec)

    def _kernel(self, spec: AttentionSpec) -> AttentionKernel:
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if shape not in self._kernels:
            self._kernels[shape] = AttentionKernel.measure(*shape, self.device)
        return self._kernels[shape]

    def logits(
        self,
        x: torch.Tensor,
        norm: NormWeight,
        head: AnyLinear,
        batch: TorchBatch,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """As the protocol says; [logits, vocabulary] float32."""
        if batch.logit_tokens.numel() == 0:
            return torch.empty((0, 0), dtype=torch.float32, device=self.device)
        normed = self.rms_norm(x.index_select(0, batch.logit_tokens), norm)
        product, heights = head.product(wide=True)
        logits = tiled_product(product, normed, heights)
        if soft_cap is not None:
            cap_softly(logits, soft_cap)
        return logits

    def pooled_states(self, x: torch.Tensor, norm: NormWeight, batch: TorchBatch) -> torch.Tensor:
        """As the protocol says; [pooled, width] float32."""
        return self._wide_norm(x.index_select(0, batch.pooled_tokens), norm)

    def finite_tokens(self, x: torch.Tensor) -> npt.NDArray[np.bool_]:
        return torch.isfinite(x).all(-1).cpu().numpy()

    def sample(self, logits: torch.Tensor, inputs: SampleInputs) -> SampleOutputs:
        return sample(logits, inputs)


def _negated_exponent(gate: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """The e for which the activation is `gate / (1 + exp(e))`."""
    if activation == "silu":
        return -gate
    # 1 + tanh u = 2 / (1 + exp(-2 u))
    inner = gate * gate * gate * GELU_CUBIC + gate
    return inner.mul_(-2.0 * GELU_SCALE)


def _inverse_rms(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return (x * x).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the leading elements of each head, in place."""
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = first * cos - second * sin
    second.mul_(cos).add_(first * sin)
    first.copy_(turned)
