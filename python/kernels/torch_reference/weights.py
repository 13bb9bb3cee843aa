"""Weight handles of the reference backend: embedding, norm, linear and rotary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from trunkline.kernels.interface import LinearSpec, RotarySpec
from trunkline.kernels.torch_reference.tiling import Product, invariant_heights, random_tensor

Ready = tuple[Product, tuple[int, ...]]
HeightCache = dict[tuple[int, int, bool, bool], tuple[int, ...]]


class EmbeddingWeight:
    """The table of a token embedding."""

    def __init__(self, num_embeddings: int, width: int, like: torch.Tensor) -> None:
        self.table = like.new_zeros((num_embeddings, width))
        self.tied: TiedLinearWeight | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self.table.shape)}

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes

    def load(self, part: str, tensor: torch.Tensor) -> None:
        _destination(self, part, tensor, self.table)
        if self.tied is not None:
            self.tied.pack()


class NormWeight:
    """Weight and epsilon of an RMS norm."""

    def __init__(self, width: int, epsilon: float, like: torch.Tensor) -> None:
        self.weight = like.new_zeros(width)
        self.epsilon = epsilon

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def load(self, part: str, tensor: torch.Tensor) -> None:
        _destination(self, part, tensor, self.weight)


class LinearWeight:
    """A fused linear; packed for oneDNN once every part is there, where torch can do that."""

    def __init__(self, spec: LinearSpec, like: torch.Tensor, cache: HeightCache) -> None:
        self._like = like
        self._cache = cache
        self._shape = (spec.out_features, spec.in_features)
        self._rows: dict[str, slice] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        start = 0
        for part in spec.parts:
            rows = slice(start, start + part.out_features)
            self._add_part(f"{part.name}.weight", rows, (part.out_features, spec.in_features))
            if part.bias:
                self._add_part(f"{part.name}.bias", rows, (part.out_features,))
            start = rows.stop
        self._unloaded = set(self._shapes)
        self._plain: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
        self._ready: Ready | None = None
        has_bias = any(part.bias for part in spec.parts)
        self.bias = like.new_zeros(spec.out_features) if has_bias else None

    def _add_part(self, name: str, rows: slice, shape: tuple[int, ...]) -> None:
        self._rows[name] = rows
        self._shapes[name] = shape

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        loaded = self._plain is not None or self._packed is not None
        element = self._like.element_size()
        return bias + (self._shape[0] * self._shape[1] * element if loaded else 0)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        rows = self._rows[part]
        self._ready = None
        if part.endswith(".bias"):
            assert self.bias is not None
            _destination(self, part, tensor, self.bias[rows])
        else:
            if self._plain is None:
                self._plain = self._unpacked()
            _destination(self, part, tensor, self._plain[rows])
        self._unloaded.discard(part)
        if not self._unloaded and self._plain is not None:
            self._packed = pack(self._plain)
            self._plain = None if self._packed is not None else self._plain

    def _unpacked(self) -> torch.Tensor:
        if self._packed is None:
            return self._like.new_zeros(self._shape)
        return self._packed.to_dense()

    def product(self) -> Ready:
        """The matrix product and the heights at which it may run."""
        if self._ready is None:
            self._ready = _product(self._plain, self._packed, self.bias, self._cache)
        return self._ready


class TiedLinearWeight:
    """The linear over an embedding's table; on the CPU it holds a packed copy."""

    def __init__(self, embedding: EmbeddingWeight, cache: HeightCache) -> None:
        self._embedding = embedding
        self._cache = cache
        self._packed: torch.Tensor | None = None
        self._ready: Ready | None = None
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
        self._ready = None

    def product(self) -> Ready:
        """The matrix product and the heights at which it may run."""
        if self._ready is None:
            self._ready = _product(self._embedding.table, self._packed, None, self._cache)
        return self._ready


class Rotary:
    """Tables of cos and sin by position."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        positions = torch.arange(spec.num_positions, dtype=torch.float32)
        angles = positions[:, None] * spec.inverse_frequencies[None, :]
        self.cos = (angles.cos() * spec.factor).to(device)  # [positions, rotary_dim / 2] float32
        self.sin = (angles.sin() * spec.factor).to(device)


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Reorder a weight for oneDNN; None where it has no such form (other devices, float16)."""
    packable = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32)
    if not packable or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return packed


def _destination(
    handle: EmbeddingWeight | NormWeight | LinearWeight,
    part: str,
    tensor: torch.Tensor,
    destination: torch.Tensor,
) -> None:
    if tuple(tensor.shape) != handle.shapes[part]:
        raise ValueError(f"{part} has shape {tuple(tensor.shape)}, not {handle.shapes[part]}")
    destination.copy_(tensor)


def _bind(
    plain: torch.Tensor | None, packed: torch.Tensor | None, bias: torch.Tensor | None
) -> Product:
    if packed is not None:
        linear = torch.ops.mkldnn._linear_pointwise
        return lambda x: linear(x, packed, bias, "none", [], "")
    assert plain is not None, "a linear is used before its weights are loaded"
    weight = plain
    return lambda x: F.linear(x, weight, bias)


def _product(
    plain: torch.Tensor | None,
    packed: torch.Tensor | None,
    bias: torch.Tensor | None,
    cache: HeightCache,
) -> Ready:
    weight = packed if packed is not None else plain
    assert weight is not None, "a linear is used before its weights are loaded"
    key = (weight.shape[0], weight.shape[1], packed is not None, bias is not None)
    if key not in cache:
        like = torch.empty(0, dtype=weight.dtype, device=weight.device)
        cache[key] = _measure_heights(key, like)
    return _bind(plain, packed, bias), cache[key]


def _measure_heights(key: tuple[int, int, bool, bool], like: torch.Tensor) -> tuple[int, ...]:
    out_features, in_features, packed, biased = key
    block = random_tensor((min(out_features, 512), in_features), like, seed=2)
    probe = block.repeat(-(-out_features // block.shape[0]), 1)[:out_features]
    bias = random_tensor((out_features,), like, seed=3) if biased else None
    product = _bind(probe, pack(probe) if packed else None, bias)
    return invariant_heights(product, in_features, like)
