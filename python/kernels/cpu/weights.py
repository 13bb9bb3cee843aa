"""Weight handles: numbers of native weights, and how tensors get into them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from trunkline.kernels.cpu.native import CpuModel
from trunkline.kernels.specs import BlockTensor, LinearSpec, RotarySpec
from trunkline.kernels.tensor_weights import turns


class EmbeddingWeight:
    """The table of a token embedding; a tied head gets every tensor that is loaded here.

    A quantised table is the weight of a linear, which a tied head then is.
    """

    def __init__(
        self, model: CpuModel, dtype: torch.dtype, num_rows: int, width: int, scale: float
    ) -> None:
        self.index = model.add_embedding(num_rows, width, scale)
        self.linear = model.embedding_linear(self.index)
        self.num_rows = num_rows
        self.width = width
        self.tied: TiedLinearWeight | None = None
        self._model = model
        self._dtype = dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.num_rows, self.width)}

    @property
    def num_bytes(self) -> int:
        if self.linear is not None:
            return self._model.linear_bytes(self.linear)
        return self._model.embedding_bytes(self.index)

    def load(self, part: str, tensor: torch.Tensor | BlockTensor) -> None:
        if self.linear is not None:
            _load_quantised(self._model, (self.linear, 0), tensor, self.shapes[part])
            return
        raw = _raw(tensor, self.shapes[part], self._dtype)
        self._model.load_embedding(self.index, raw)
        if self.tied is not None:
            self._model.load_linear(self.tied.index, 0, raw)


class NormWeight:
    """Weight and epsilon of an RMS norm."""

    def __init__(
        self, model: CpuModel, dtype: torch.dtype, width: int, epsilon: float, offset: float
    ) -> None:
        self.index = model.add_norm(width, epsilon, offset)
        self.width = width
        self._model = model
        self._dtype = dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.width,)}

    @property
    def num_bytes(self) -> int:
        return self._model.norm_bytes(self.index)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        self._model.load_norm(self.index, _raw(tensor, self.shapes[part], self._dtype))


class SinksWeight:
    """A score per head."""

    def __init__(self, model: CpuModel, dtype: torch.dtype, num_heads: int) -> None:
        self.index = model.add_sinks(num_heads)
        self._num_heads = num_heads
        self._model = model
        self._dtype = dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"sinks": (self._num_heads,)}

    @property
    def num_bytes(self) -> int:
        return self._model.sinks_bytes(self.index)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        self._model.load_sinks(self.index, _raw(tensor, self.shapes[part], self._dtype))


class LinearWeight:
    """A fused linear, packed part by part."""

    def __init__(
        self, model: CpuModel, dtype: torch.dtype, spec: LinearSpec, is_quantised: bool = False
    ) -> None:
        widths = [part.out_features for part in spec.parts]
        has_bias = any(part.bias for part in spec.parts)
        self.index = model.add_linear(spec.in_features, widths, has_bias)
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self._model = model
        self._dtype = dtype
        self._is_quantised = is_quantised
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, int] = {}
        for index, part in enumerate(spec.parts):
            names: dict[str, tuple[int, ...]] = {
                f"{part.name}.weight": (part.out_features, spec.in_features)
            }
            if part.bias:
                names[f"{part.name}.bias"] = (part.out_features,)
            self._shapes |= names
            self._parts |= dict.fromkeys(names, index)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def num_bytes(self) -> int:
        return self._model.linear_bytes(self.index)

    def load(self, part: str, tensor: torch.Tensor | BlockTensor) -> None:
        place = (self.index, self._parts[part])
        if part.endswith(".bias"):
            self._model.load_bias(*place, _raw(tensor, self._shapes[part], self._dtype))
        elif self._is_quantised:
            _load_quantised(self._model, place, tensor, self._shapes[part])
        else:
            self._model.load_linear(*place, _raw(tensor, self._shapes[part], self._dtype))


class TiedLinearWeight:
    """The linear over an embedding's table: a packed copy, loaded through the embedding.

    Of a quantised table it is no copy.
    """

    def __init__(self, model: CpuModel, embedding: EmbeddingWeight) -> None:
        self.in_features = embedding.width
        self.out_features = embedding.num_rows
        self._model = model
        self._is_copy = embedding.linear is None
        if embedding.linear is not None:
            self.index = embedding.linear
        else:
            self.index = model.add_linear(embedding.width, [embedding.num_rows], False)
            embedding.tied = self

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    @property
    def num_bytes(self) -> int:
        return self._model.linear_bytes(self.index) if self._is_copy else 0

    def load(self, part: str, tensor: torch.Tensor) -> None:
        raise KeyError(part)


class Rotary:
    """Tables of cos and sin by position."""

    def __init__(self, model: CpuModel, spec: RotarySpec) -> None:
        cos, sin = (turn.numpy().tobytes() for turn in turns(spec))
        self.index = model.add_rotary(spec.inverse_frequencies.numel(), cos, sin)


def _load_quantised(
    model: CpuModel,
    place: tuple[int, int],
    tensor: torch.Tensor | BlockTensor,
    shape: tuple[int, ...],
) -> None:
    """Pack blocks as they are stored; quantise anything else, from its own precision."""
    if isinstance(tensor, BlockTensor):
        _check_shape(tensor, shape)
        model.load_linear(*place, np.ascontiguousarray(tensor.rows).data, tensor.kind)
    elif tensor.dtype == torch.bfloat16:
        model.load_linear(*place, _raw(tensor, shape, torch.bfloat16), "bfloat16")
    else:
        model.load_linear(*place, _raw(tensor, shape, torch.float32), "float32")


def _check_shape(tensor: torch.Tensor | BlockTensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"a tensor has shape {tuple(tensor.shape)}, not {shape}")


def _raw(
    tensor: torch.Tensor | BlockTensor, shape: tuple[int, ...], dtype: torch.dtype
) -> memoryview:
    _check_shape(tensor, shape)
    if isinstance(tensor, BlockTensor):
        raise ValueError(f"a tensor of type {tensor.kind} must be dequantised to be loaded here")
    flat = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
