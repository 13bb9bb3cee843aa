"""Weight handles of the reference backend: embedding, linear and rotary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from trunkline.kernels import tensor_weights
from trunkline.kernels.specs import LinearSpec, RotarySpec
from trunkline.kernels.tensor_weights import FusedParts, copy_part, turns
from trunkline.kernels.torch_reference.tiling import (
    CANDIDATE_HEIGHTS,
    Product,
    invariant_heights,
    random_tensor,
)

MAX_WIDE_ROWS = 64  # rows of logits at once: vocabularies are wide

Ready = tuple[Product, tuple[int, ...]]
HeightCache = dict["ProductKey", tuple[int, ...]]


class ProductKey(NamedTuple):
    """What the invariant heights of a product depend on, for one backend."""

    out_features: int
    in_features: int
    packed: bool
    biased: bool
    wide: bool  # float32 output


class EmbeddingWeight(tensor_weights.EmbeddingWeight):
    """An embedding whose table may be a linear, too, which then follows it."""

    tied: TiedLinearWeight | None = None

    def load(self, part: str, tensor: torch.Tensor) -> None:
        super().load(part, tensor)
        if self.tied is not None:
            self.tied.pack()


class LinearWeight:
    """A fused linear; packed for oneDNN once every part is there, where torch can do that."""

    def __init__(self, spec: LinearSpec, like: torch.Tensor, cache: HeightCache) -> None:
        self._like = like
        self._cache = cache
        self._shape = (spec.out_features, spec.in_features)
        self._parts = FusedParts(spec)
        self._unloaded = set(self._parts.shapes)
        self._plain: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
        self._ready: dict[bool, Ready] = {}
        self.bias = like.new_zeros(spec.out_features) if self._parts.has_bias else None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._parts.shapes

    @property
    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        loaded = self._plain is not None or self._packed is not None
        element = self._like.element_size()
        return bias + (self._shape[0] * self._shape[1] * element if loaded else 0)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        rows = self._parts.rows[part]
        self._ready = {}
        if part.endswith(".bias"):
            assert self.bias is not None
            copy_part(self.shapes, part, tensor, self.bias[rows])
        else:
            if self._plain is None:
                self._plain = self._unpacked()
            copy_part(self.shapes, part, tensor, self._plain[rows])
        self._unloaded.discard(part)
        if not self._unloaded and self._plain is not None:
            self._packed = pack(self._plain)
            self._plain = None if self._packed is not None else self._plain

    def _unpacked(self) -> torch.Tensor:
        if self._packed is None:
            return self._like.new_zeros(self._shape)
        return self._packed.to_dense()

    def product(self, wide: bool = False) -> Ready:
        """The matrix product, in float32 if `wide`, and the heights at which it may run."""
        if wide not in self._ready:
            stored = _Stored(self._plain, self._packed, self.bias)
            self._ready[wide] = _product(stored, wide, self._cache)
        return self._ready[wide]


class TiedLinearWeight:
    """The linear over an embedding's table; on the CPU it holds a packed copy."""

    def __init__(self, embedding: EmbeddingWeight, cache: HeightCache) -> None:
        self._embedding = embedding
        self._cache = cache
        self._packed: torch.Tensor | None = None
        self._ready: dict[bool, Ready] = {}
        embedding.tied = self

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    @property
    def num_bytes(self) -> int:
        return 0 if self._packed is None else self._embedding.num_bytes

    def load(self, part: str, tensor: torch.Tensor) -> None:
        raise KeyError(part)

    def pack(self) -> None:
        """Take over the embedding's present table."""
        self._packed = pack(self._embedding.table)
        self._ready = {}

    def product(self, wide: bool = False) -> Ready:
        """The matrix product, in float32 if `wide`, and the heights at which it may run."""
        if wide not in self._ready:
            stored = _Stored(self._embedding.table, self._packed, None)
            self._ready[wide] = _product(stored, wide, self._cache)
        return self._ready[wide]


class Rotary:
    """Tables of cos and sin by position."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        # [positions, rotary_dim / 2] float32
        self.cos, self.sin = (turn.to(device) for turn in turns(spec))


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Reorder a weight for oneDNN; None where it has no such form (other devices, float16)."""
    packable = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32)
    if not packable or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return packed


class _Stored(NamedTuple):
    plain: torch.Tensor | None
    packed: torch.Tensor | None
    bias: torch.Tensor | None

    def product(self, wide: bool) -> Product:
        if self.packed is not None:
            return self._packed_product(wide and self.packed.dtype != torch.float32)
        assert self.plain is not None, "a linear is used before its weights are loaded"
        weight, bias = self.plain, self.bias
        if not wide or weight.dtype == torch.float32:
            return lambda x: F.linear(x, weight, bias)
        if weight.device.type == "cuda" and bias is None:
            return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32)
        return lambda x: F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def _packed_product(self, widen: bool) -> Product:
        packed, bias = self.packed, self.bias
        linear = torch.ops.mkldnn._linear_pointwise
        if not widen:
            return lambda x: linear(x, packed, bias, "none", [], "")

        def in_two_parts(x: torch.Tensor) -> torch.Tensor:
            # The product sums in float32 and then rounds. A second one subtracts the rounded result
            # from the sum before rounding, which gives the part that was lost.
            rounded = linear(x, packed, bias, "none", [], "")
            lost = linear.binary(x, -rounded, packed, bias, "add")
            exact: torch.Tensor = rounded.float().add_(lost.float())
            return exact

        return in_two_parts


def _product(stored: _Stored, wide: bool, cache: HeightCache) -> Ready:
    weight = stored.packed if stored.packed is not None else stored.plain
    assert weight is not None, "a linear is used before its weights are loaded"
    out_features, in_features = weight.shape
    packed, biased = stored.packed is not None, stored.bias is not None
    key = ProductKey(out_features, in_features, packed, biased, wide)
    if key not in cache:
        cache[key] = _measure_heights(key, torch.empty(0, dtype=weight.dtype, device=weight.device))
    return stored.product(wide), cache[key]


def _measure_heights(key: ProductKey, like: torch.Tensor) -> tuple[int, ...]:
    block = random_tensor((min(key.out_features, 512), key.in_features), like, seed=2)
    probe = block.repeat(-(-key.out_features // block.shape[0]), 1)[: key.out_features]
    bias = random_tensor((key.out_features,), like, seed=3) if key.biased else None
    stored = _Stored(probe, pack(probe) if key.packed else None, bias)
    tallest = MAX_WIDE_ROWS if key.wide else CANDIDATE_HEIGHTS[-1]
    return invariant_heights(stored.product(key.wide), key.in_features, like, tallest)
