"""Weight handles: tensors on the device, filled part by part as the checkpoint is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from trunkline.kernels.interface import LinearSpec, RotarySpec
from trunkline.kernels.triton.fp8 import ALIGNMENT, quantize_weight
from trunkline.kernels.triton.launch import FP8


class EmbeddingWeight:
    """The table of a token embedding, [vocabulary, width] in the model's dtype, and a factor."""

    def __init__(
        self, num_embeddings: int, width: int, like: torch.Tensor, scale: float = 1.0
    ) -> None:
        self.table = like.new_zeros((num_embeddings, width))
        self.scale = scale

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self.table.shape)}

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes

    def load(self, part: str, tensor: torch.Tensor) -> None:
        _copy_part(self.shapes, part, tensor, self.table)


class NormWeight:
    """Weight with its offset, in float32, and epsilon of an RMS norm."""

    def __init__(self, width: int, epsilon: float, like: torch.Tensor, offset: float = 0.0) -> None:
        self.weight = like.new_zeros(width, dtype=torch.float32)
        self.epsilon = epsilon
        self._offset = offset

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def load(self, part: str, tensor: torch.Tensor) -> None:
        _copy_part(self.shapes, part, tensor, self.weight)
        self.weight += self._offset


class SinksWeight:
    """A score per head, in float32."""

    def __init__(self, num_heads: int, like: torch.Tensor) -> None:
        self.scores = like.new_zeros(num_heads, dtype=torch.float32)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"sinks": tuple(self.scores.shape)}

    @property
    def num_bytes(self) -> int:
        return self.scores.nbytes

    def load(self, part: str, tensor: torch.Tensor) -> None:
        _copy_part(self.shapes, part, tensor, self.scores)


class LinearWeight:
    """A fused linear: the parts' rows one below another.

    With `quantize` the matrix is fp8 (e4m3) with one scale per output channel, and a part is
    quantised on the device when it is loaded; no second copy of it stays.
    """

    def __init__(self, spec: LinearSpec, like: torch.Tensor, *, quantize: bool = False) -> None:
        shape = (spec.out_features, spec.in_features)
        if quantize and any(size % ALIGNMENT for size in shape):
            raise ValueError(
                f"quantization fp8 needs linears whose sizes are multiples of {ALIGNMENT}, but "
                f"{'+'.join(part.name for part in spec.parts)} has {shape[0]} x {shape[1]}"
            )
        self.weight = like.new_zeros(shape, dtype=FP8 if quantize else like.dtype)
        self.scales = like.new_ones(shape[0], dtype=torch.float32) if quantize else None
        self.bias = (
            like.new_zeros(spec.out_features) if any(part.bias for part in spec.parts) else None
        )
        self._rows: dict[str, slice] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        start = 0
        for part in spec.parts:
            rows = slice(start, start + part.out_features)
            self._add_part(f"{part.name}.weight", rows, (part.out_features, spec.in_features))
            if part.bias:
                self._add_part(f"{part.name}.bias", rows, (part.out_features,))
            start = rows.stop

    def _add_part(self, name: str, rows: slice, shape: tuple[int, ...]) -> None:
        self._rows[name] = rows
        self._shapes[name] = shape

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def num_bytes(self) -> int:
        extra = (self.bias, self.scales)
        return self.weight.nbytes + sum(tensor.nbytes for tensor in extra if tensor is not None)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        rows = self._rows[part]
        if part.endswith(".bias"):
            assert self.bias is not None
            _copy_part(self._shapes, part, tensor, self.bias[rows])
        elif self.scales is None:
            _copy_part(self._shapes, part, tensor, self.weight[rows])
        else:
            _check_shape(self._shapes, part, tensor)
            quantize_weight(tensor, self.weight[rows], self.scales[rows])


class TiedLinearWeight:
    """The linear over an embedding's own table."""

    scales = None
    bias = None

    def __init__(self, embedding: EmbeddingWeight) -> None:
        self._embedding = embedding

    @property
    def weight(self) -> torch.Tensor:
        """[vocabulary, width]."""
        return self._embedding.table

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    @property
    def num_bytes(self) -> int:
        return 0

    def load(self, part: str, tensor: torch.Tensor) -> None:
        raise KeyError(part)


AnyLinear: TypeAlias = LinearWeight | TiedLinearWeight


class Rotary:
    """Cos and sin by position, [positions, rotary_dim] float32: cosines, then sines."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        positions = torch.arange(spec.num_positions, dtype=torch.float32)
        angles = positions[:, None] * spec.inverse_frequencies[None, :]
        halves = (angles.cos() * spec.factor, angles.sin() * spec.factor)
        self.cos_sin = torch.cat(halves, dim=1).to(device)


def _check_shape(shapes: Mapping[str, tuple[int, ...]], part: str, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != shapes[part]:
        raise ValueError(f"{part} has shape {tuple(tensor.shape)}, not {shapes[part]}")


def _copy_part(
    shapes: Mapping[str, tuple[int, ...]],
    part: str,
    tensor: torch.Tensor,
    destination: torch.Tensor,
) -> None:
    _check_shape(shapes, part, tensor)
    destination.copy_(tensor)
