"""The handle of a router and its experts: three tensors for all experts, filled one by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trunkline.kernels.specs import ExpertsSpec
from trunkline.kernels.tensor_weights import check_part
from trunkline.kernels.triton.fp8 import ALIGNMENT, quantize_weight
from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.moe import ExpertWeights


class ExpertsHandle:
    """See `kernels.specs.Weight`. With `quantize` the experts are fp8, the router never is."""

    bias = None

    def __init__(self, spec: ExpertsSpec, like: torch.Tensor, *, quantize: bool) -> None:
        experts, width, hidden = spec.num_experts, spec.width, spec.hidden_size
        if quantize and (width % ALIGNMENT or hidden % ALIGNMENT):
            raise ValueError(
                f"quantization fp8 needs experts whose sizes are multiples of {ALIGNMENT}, but "
                f"they have {width} x {hidden}"
            )
        dtype = FP8 if quantize else like.dtype
        self.spec = spec
        self.weight = like.new_zeros((experts, hidden))  # of the router
        self.experts = ExpertWeights(
            gate_up=like.new_zeros((experts, 2 * width, hidden), dtype=dtype),
            down=like.new_zeros((experts, hidden, width), dtype=dtype),
            gate_up_scales=_ones(like, experts, 2 * width) if quantize else None,
            down_scales=_ones(like, experts, hidden) if quantize else None,
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.spec.shapes

    @property
    def num_bytes(self) -> int:
        tensors = (
            self.weight,
            self.experts.gate_up,
            self.experts.down,
            self.experts.gate_up_scales,
            self.experts.down_scales,
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        check_part(self.spec.shapes, part, tensor)
        if part == "gate.weight":
            self.weight.copy_(tensor)
            return
        _, number, name, _ = part.split(".")
        expert, width = int(number), self.spec.width
        experts = self.experts
        if name == "down_proj":
            _fill(experts.down[expert], experts.down_scales, expert, slice(None), tensor)
        else:
            rows = slice(0, width) if name == "gate_proj" else slice(width, 2 * width)
            _fill(experts.gate_up[expert, rows], experts.gate_up_scales, expert, rows, tensor)


def _ones(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_ones(shape, dtype=torch.float32)


def _fill(
    target: torch.Tensor,
    scales: torch.Tensor | None,
    expert: int,
    rows: slice,
    tensor: torch.Tensor,
) -> None:
    if scales is None:
        target.copy_(tensor)
    else:
        quantize_weight(tensor, target, scales[expert, rows])
