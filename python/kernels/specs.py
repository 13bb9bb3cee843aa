"""What models tell of their weights and operations when they create them.

The words of `interface`, without the operations: no backend and no model is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from trunkline.kernels.tensor_weights import KvScales

ActivationName = Literal["silu", "gelu_tanh"]  # gelu_tanh: gelu by its tanh approximation


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix as a GGUF file stores it: rows of quantised blocks."""

    kind: str  # ggml's name of the type
    shape: tuple[int, ...]  # of the elements
    rows: npt.NDArray[np.uint8]  # [rows, bytes of a row], read-only


class Weight(Protocol):
    """A handle of one or several checkpoint tensors, in whatever form the backend computes on."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape that `load` expects, by the name of the part."""

    @property
    def num_bytes(self) -> int:
        """Memory that the handle holds now."""

    def load(self, part: str, tensor: Any) -> None:
        """Copy one checkpoint tensor into the handle; at any time, also over an older one.

        Args:
            part: a key of `shapes`.
            tensor: a torch tensor of any dtype and device, or what `BlockBackend` says; not kept.
        """


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One checkpoint projection of a fused linear: `name.weight` and, with `bias`, `name.bias`."""

    name: str
    out_features: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """`y = x W^T + b`, the parts' outputs one after another."""

    in_features: int
    parts: tuple[LinearPart, ...]

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return sum(part.out_features for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A router and its experts, each a gated MLP without biases."""

    hidden_size: int
    width: int  # gates of one expert
    num_experts: int
    top_k: int
    renormalise: bool  # the chosen experts' shares sum to one
    activation: ActivationName

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parts of the handle: the router is `gate.weight`."""
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (self.num_experts, self.hidden_size)}
        for expert in range(self.num_experts):
            for name in ("gate_proj", "up_proj"):
                shapes[f"experts.{expert}.{name}.weight"] = (self.width, self.hidden_size)
            shapes[f"experts.{expert}.down_proj.weight"] = (self.hidden_size, self.width)
        return shapes


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary encoding in halves: angles `position * inverse_frequency`, cos and sin times `factor`.

    The first `2 * len(inverse_frequencies)` elements of a head are turned.
    """

    inverse_frequencies: torch.Tensor  # [rotary_dim / 2] float32, CPU
    factor: float
    num_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention.

    Scores are `scale * q k`; with a soft cap, `cap * tanh(score / cap)`. A sink is a score per head
    that takes its share of the softmax and has no value; it is neither scaled nor capped.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Any  # of `Backend.create_rotary`
    window: int | None = None  # keys that a query sees, itself included
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # above 0
    sinks: Weight | None = None  # of `Backend.create_sinks`
    query_norm: Weight | None = None
    key_norm: Weight | None = None
    kv_scales: KvScales | None = None  # for pools in fp8; others do without

    def __post_init__(self) -> None:
        """Refuse values that backends would take for no window and no cap."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, must be at least 1, or None for all keys")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap is {self.soft_cap}, must be above 0, or None for no cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """Size of a KV pool; page 0 is reserved for padding and is never written."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
