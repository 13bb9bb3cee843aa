"""The CUDA backend: operations on device tensors by Triton kernels, cuBLAS and FlashInfer.

It computes an operation when it is called; `program.py` runs whole steps of a model with it, and
captures those that recur. On a CPU the same code runs in Triton's interpreter, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trunkline.kernels.interface import BackendOptions, ForwardOutputs, OptionError, ProgramSizes
from trunkline.kernels.specs import (
    ActivationName,
    AttentionSpec,
    ExpertsSpec,
    LinearSpec,
    RotarySpec,
    Weight,
)
from trunkline.kernels.tensor_weights import EmbeddingWeight, NormWeight, SinksWeight
from trunkline.kernels.triton.activation import gate_up
from trunkline.kernels.triton.attention import create_attention
from trunkline.kernels.triton.batch import DeviceBatch
from trunkline.kernels.triton.experts import ExpertsHandle
from trunkline.kernels.triton.linears import Linears
from trunkline.kernels.triton.moe import mixture
from trunkline.kernels.triton.norm import PostNorm, add_normed, add_rms_norm, rms_norm
from trunkline.kernels.triton.program import DeviceProgram
from trunkline.kernels.triton.rotary import rotate_and_write
from trunkline.kernels.triton.soft_cap import cap_softly
from trunkline.kernels.triton.weights import (
    AnyLinear,
    LinearWeight,
    Rotary,
    TiedLinearWeight,
)

KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(slots=True)
class Residual:
    """The residual stream in float32, to which `delta` is yet to be added.

    The next norm adds it on its way, which saves a pass over memory.
    """

    value: torch.Tensor  # [tokens, width] float32
    delta: torch.Tensor | None = None
    post_norm: PostNorm | None = None  # that `delta` goes through first

    def settled(self) -> torch.Tensor:
        """The sum, in place."""
        if self.delta is not None and self.post_norm is not None:
            add_normed(self.delta, self.value, self.post_norm)
        elif self.delta is not None:
            self.value.add_(self.delta)
        self.delta = None
        return self.value


class TritonBackend:
    """See `kernels.interface.ProgramBackend`.

    With `options.deterministic` bits never depend on batch, chunk or step: linears and attention
    reduce in one order for any number of rows. Otherwise linears are cuBLAS's, whose order varies.
    """

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype, options: BackendOptions) -> None:
        """Choose kernels.

        Raises:
            OptionError: an option is unknown, or this device cannot do it.
        """
        if options.kv_dtype not in KV_DTYPES:
            raise OptionError(
                f"kv_cache_dtype {options.kv_dtype!r} is not supported; known: "
                f"{', '.join(KV_DTYPES)}"
            )
        self.device = device
        self.dtype = dtype
        self.options = options
        self.kv_dtype = KV_DTYPES[options.kv_dtype] or dtype
        self.vocab_size = 0
        self._like = torch.empty(0, device=device, dtype=dtype)
        self._linears = Linears(self._like, options)
        self.attention = create_attention(device, dtype, self.kv_dtype, options)

    def create_embedding(
        self, num_embeddings: int, width: int, scale: float = 1.0
    ) -> EmbeddingWeight:
        self.vocab_size = num_embeddings
        return EmbeddingWeight(num_embeddings, width, self._like, scale)

    def create_norm(self, width: int, epsilon: float, offset: float = 0.0) -> NormWeight:
        return NormWeight(width, epsilon, self._like, offset)

    def create_linear(self, spec: LinearSpec) -> LinearWeight:
        return self._linears.create(spec)

    def create_tied_linear(self, embedding: EmbeddingWeight) -> TiedLinearWeight:
        return TiedLinearWeight(embedding)

    def create_sinks(self, num_heads: int) -> SinksWeight:
        return SinksWeight(num_heads, self._like)

    def create_experts(self, spec: ExpertsSpec) -> ExpertsHandle:
        return self._linears.create_experts(spec)

    def create_rotary(self, spec: RotarySpec) -> Rotary:
        return Rotary(spec, self.device)

    def create_program(
        self, forward: Callable[[DeviceBatch], ForwardOutputs], sizes: ProgramSizes
    ) -> DeviceProgram:
        return DeviceProgram(forward, self, sizes)

    def embed(self, weight: EmbeddingWeight, batch: DeviceBatch) -> Residual:
        rows = weight.table.index_select(0, batch.token_ids).float()
        return Residual(rows if weight.scale == 1.0 else rows.mul_(weight.scale))

    def rms_norm(self, x: Residual, norm: NormWeight) -> torch.Tensor:
        out = torch.empty(x.value.shape, dtype=self.dtype, device=self.device)
        if x.delta is None:
            rms_norm(x.value, norm.weight, norm.epsilon, out)
        else:
            weight, epsilon = norm.weight, norm.epsilon
            add_rms_norm(x.delta, x.value, weight, epsilon, out, post_norm=x.post_norm)
            x.delta = None
        return out

    def linear(self, x: torch.Tensor, weight: AnyLinear) -> torch.Tensor:
        return self._linears.product(x, weight)

    def norm_linear(self, x: Residual, norm: NormWeight, weight: AnyLinear) -> torch.Tensor:
        return self.linear(self.rms_norm(x, norm), weight)

    def gate_up_activation(self, x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=self.dtype, device=self.device)
        gate_up(x, activation, out)
        return out

    def linear_add(self, x: torch.Tensor, weight: AnyLinear, residual: Residual) -> Residual:
        return Residual(residual.settled(), self.linear(x, weight))

    def norm_add(self, x: torch.Tensor, norm: NormWeight, residual: Residual) -> Residual:
        return Residual(residual.settled(), x, PostNorm(norm.weight, norm.epsilon))

    def moe(self, x: Residual, norm: NormWeight, experts: ExpertsHandle) -> Residual:
        normed = self.rms_norm(x, norm)
        spec = experts.spec
        mixture(
            normed,
            self._linears.wide_product(normed, experts),
            experts.experts,
            x.settled(),
            top_k=spec.top_k,
            renormalise=spec.renormalise,
            activation=spec.activation,
            deterministic=self.options.deterministic,
        )
        return x

    def attend(self, qkv: torch.Tensor, spec: AttentionSpec, batch: DeviceBatch) -> torch.Tensor:
        shape = (batch.num_tokens, spec.num_heads, spec.head_dim)
        query = torch.empty(shape, dtype=self.dtype, device=self.device)
        rotary: Rotary = spec.rotary
        rotate_and_write(
            qkv,
            rotary.cos_sin,
            _weight(spec.query_norm),
            _weight(spec.key_norm),
            _epsilon(spec),
            batch.layer(spec),
            batch.token_slot,
            batch.positions,
            query,
        )
        out = torch.empty_like(query)
        self.attention.attend(query, spec, batch, out)
        return out.view(batch.num_tokens, -1)

    def logits(
        self,
        x: Residual,
        norm: NormWeight,
        head: AnyLinear,
        batch: DeviceBatch,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """As the protocol says; [logits, vocabulary] float32."""
        if batch.logit_tokens is None:
            normed = self.rms_norm(x, norm)
        else:
            shape = (batch.logit_tokens.shape[0], x.value.shape[1])
            normed = torch.empty(shape, dtype=self.dtype, device=self.device)
            rms_norm(x.settled(), norm.weight, norm.epsilon, normed, rows=batch.logit_tokens)
        logits = self._linears.wide_product(normed, head, batch.logits_out)
        if soft_cap is not None:
            cap_softly(logits, soft_cap)
        return logits

    def pooled_states(self, x: Residual, norm: NormWeight, batch: DeviceBatch) -> torch.Tensor:
        """As the protocol says; [pooled, width] float32."""
        shape = (batch.pooled_tokens.shape[0], x.value.shape[1])
        out = torch.empty(shape, dtype=torch.float32, device=self.device)
        rms_norm(x.settled(), norm.weight, norm.epsilon, out, rows=batch.pooled_tokens)
        return out


def _epsilon(spec: AttentionSpec) -> float:
    norms = (spec.query_norm, spec.key_norm)
    found = {norm.epsilon for norm in norms if isinstance(norm, NormWeight)}
    if len(found) > 1:
        raise ValueError(f"norms of queries and keys have epsilons {sorted(found)}: one is needed")
    return found.pop() if found else 0.0


def _weight(norm: Weight | None) -> torch.Tensor | None:
    return norm.weight if isinstance(norm, NormWeight) else None
