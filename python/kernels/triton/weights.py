"""Weight handles of the CUDA backend: linears and rotary; the others are `tensor_weights`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from trunkline.kernels.specs import LinearSpec, RotarySpec
from trunkline.kernels.tensor_weights import (
    EmbeddingWeight,
    FusedParts,
    check_part,
    copy_part,
    turns,
)
from trunkline.kernels.triton.fp8 import ALIGNMENT, quantize_weight
from trunkline.kernels.triton.launch import FP8


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
        self._parts = FusedParts(spec)
        self.bias = like.new_zeros(spec.out_features) if self._parts.has_bias else None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._parts.shapes

    @property
    def num_bytes(self) -> int:
        extra = (self.bias, self.scales)
        return self.weight.nbytes + sum(tensor.nbytes for tensor in extra if tensor is not None)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        rows = self._parts.rows[part]
        if part.endswith(".bias"):
            assert self.bias is not None
            copy_part(self.shapes, part, tensor, self.bias[rows])
        elif self.scales is None:
            copy_part(self.shapes, part, tensor, self.weight[rows])
        else:
            check_part(self.shapes, part, tensor)
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
        self.cos_sin = torch.cat(turns(spec), dim=1).to(device)
