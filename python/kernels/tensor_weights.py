"""Weight handles that are plain torch tensors, and what handles of every backend need.

See `specs.Weight`. Backends that pack or quantise a weight have handles of their own for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from trunkline.kernels.specs import LinearSpec, RotarySpec

Shapes = Mapping[str, tuple[int, ...]]


def check_part(shapes: Shapes, part: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of another shape than the part's.

    Raises:
        ValueError: it has one.
    """
    if tuple(tensor.shape) != shapes[part]:
        raise ValueError(f"{part} has shape {tuple(tensor.shape)}, not {shapes[part]}")


def copy_part(shapes: Shapes, part: str, tensor: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy a part to where it belongs, in that tensor's dtype.

    Raises:
        ValueError: it has another shape.
    """
    check_part(shapes, part, tensor)
    destination.copy_(tensor)


class TensorWeight:
    """A tensor with one part, zero until it is loaded."""

    def __init__(self, part: str, tensor: torch.Tensor) -> None:
        self._shapes = {part: tuple(tensor.shape)}
        self._tensor = tensor

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    @property
    def num_bytes(self) -> int:
        return self._tensor.nbytes

    def load(self, part: str, tensor: torch.Tensor) -> None:
        copy_part(self._shapes, part, tensor, self._tensor)


class EmbeddingWeight(TensorWeight):
    """The table of a token embedding, [vocabulary, width] in the model's dtype, and a factor."""

    def __init__(
        self, num_embeddings: int, width: int, like: torch.Tensor, scale: float = 1.0
    ) -> None:
        self.table = like.new_zeros((num_embeddings, width))
        self.scale = scale
        super().__init__("weight", self.table)


class NormWeight(TensorWeight):
    """Weight with its offset, in float32, and epsilon of an RMS norm."""

    def __init__(self, width: int, epsilon: float, like: torch.Tensor, offset: float = 0.0) -> None:
        self.weight = like.new_zeros(width, dtype=torch.float32)
        self.epsilon = epsilon
        self._offset = offset
        super().__init__("weight", self.weight)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        super().load(part, tensor)
        self.weight += self._offset


class SinksWeight(TensorWeight):
    """A score per head, in float32."""

    def __init__(self, num_heads: int, like: torch.Tensor) -> None:
        self.scores = like.new_zeros(num_heads, dtype=torch.float32)
        super().__init__("sinks", self.scores)


class KvScales:
    """What a layer's keys and values are divided by in fp8.

    Its parts are `k_scale` and `v_scale`, a number each; 1 until they are loaded.
    """

    num_bytes = 0

    def __init__(self) -> None:
        self._values = {"k_scale": 1.0, "v_scale": 1.0}

    @property
    def shapes(self) -> Shapes:
        return dict.fromkeys(self._values, (1,))

    @property
    def key(self) -> float:
        """Of keys."""
        return self._values["k_scale"]

    @property
    def value(self) -> float:
        """Of values."""
        return self._values["v_scale"]

    def load(self, part: str, tensor: torch.Tensor) -> None:
        scale = float(tensor.item())
        if not 0 < scale < math.inf:
            raise ValueError(f"{part} is {scale}, must be above 0 and finite")
        self._values[part] = scale


class FusedParts:
    """The parts of a fused linear: their shapes, and their rows, one part below another."""

    def __init__(self, spec: LinearSpec) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rows: dict[str, slice] = {}
        start = 0
        for part in spec.parts:
            rows = slice(start, start + part.out_features)
            self.shapes[f"{part.name}.weight"] = (part.out_features, spec.in_features)
            self.rows[f"{part.name}.weight"] = rows
            if part.bias:
                self.shapes[f"{part.name}.bias"] = (part.out_features,)
                self.rows[f"{part.name}.bias"] = rows
            start = rows.stop
        self.has_bias = any(part.bias for part in spec.parts)


def turns(spec: RotarySpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position, [positions, rotary_dim / 2] float32, CPU."""
    positions = torch.arange(spec.num_positions, dtype=torch.float32)
    angles = positions[:, None] * spec.inverse_frequencies[None, :]
    return angles.cos() * spec.factor, angles.sin() * spec.factor
