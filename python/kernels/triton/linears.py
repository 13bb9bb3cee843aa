"""Linears: cuBLAS, fp8 with a scale per row, or the kernel with one order of sums for any batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trunkline.kernels.interface import BackendOptions, OptionError
from trunkline.kernels.specs import ExpertsSpec, LinearSpec
from trunkline.kernels.triton.experts import ExpertsHandle
from trunkline.kernels.triton.fp8 import quantize_rows, scaled_linear
from trunkline.kernels.triton.launch import FP8, INTERPRETED
from trunkline.kernels.triton.matmul import fixed_matmul
from trunkline.kernels.triton.weights import AnyLinear, LinearWeight

# Products of bf16 and fp8 rows with scales per row are in torch from this compute capability on.
LEAST_FP8_CAPABILITY = 90


class Linears:
    """Creates linears, and multiplies with them as the options say."""

    def __init__(self, like: torch.Tensor, options: BackendOptions) -> None:
        """Check the options.

        Raises:
            OptionError: this device or dtype cannot do what they ask for.
        """
        self._like = like
        self._deterministic = options.deterministic
        self._quantize = options.quantization == "fp8"
        if options.quantization not in ("none", "fp8"):
            raise OptionError(
                f"quantization {options.quantization!r} is not supported by the triton backend; "
                "known: none, fp8"
            )
        if self._quantize:
            _check_fp8(like)

    def create(self, spec: LinearSpec) -> LinearWeight:
        """Handle of a linear. The head keeps its dtype: it is read once, and decides the token."""
        is_head = spec.parts[0].name == "lm_head"
        return LinearWeight(spec, self._like, quantize=self._quantize and not is_head)

    def create_experts(self, spec: ExpertsSpec) -> ExpertsHandle:
        """Handle of a router and its experts."""
        return ExpertsHandle(spec, self._like, quantize=self._quantize)

    def product(self, x: torch.Tensor, weight: AnyLinear) -> torch.Tensor:
        """`x W^T + b` in the model's dtype."""
        if weight.scales is None and not self._deterministic:
            return F.linear(x, weight.weight, weight.bias)
        out = x.new_empty((x.shape[0], weight.weight.shape[0]))
        if weight.scales is None:
            fixed_matmul(x, weight.weight, weight.bias, None, out)
            return out
        narrow = x.new_empty(x.shape, dtype=FP8)
        scales = x.new_empty(x.shape[0], dtype=torch.float32)
        quantize_rows(x, narrow, scales)
        if not self._deterministic:
            bias, dtype = weight.bias, x.dtype
            return scaled_linear(narrow, scales, weight.weight, weight.scales, bias, dtype)
        fixed_matmul(
            narrow,
            weight.weight,
            weight.bias,
            None,
            out,
            x_scales=scales,
            weight_scales=weight.scales,
        )
        return out

    def wide_product(
        self,
        x: torch.Tensor,
        weight: AnyLinear | ExpertsHandle,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x W^T + b` in float32, not rounded on the way.

        Args:
            x: [rows, in].
            weight: not quantised; of experts the router.
            out: [rows, out] float32: where the result goes; None: it is allocated.
        """
        matrix, bias = weight.weight, weight.bias
        if out is None:
            out = x.new_empty((x.shape[0], matrix.shape[0]), dtype=torch.float32)
        if self._deterministic:
            fixed_matmul(x, matrix, bias, None, out)
            return out
        if x.device.type == "cuda" and x.dtype != torch.float32:
            torch.mm(x, matrix.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), matrix.t().float(), out=out)
        return out if bias is None else out.add_(bias)


def _check_fp8(like: torch.Tensor) -> None:
    if INTERPRETED:
        return
    if like.device.type != "cuda":
        raise OptionError(f"quantization fp8 needs a CUDA device, but the device is {like.device}")
    major, minor = torch.cuda.get_device_capability(like.device)
    if major * 10 + minor < LEAST_FP8_CAPABILITY:
        raise OptionError(
            f"quantization fp8 needs compute capability {LEAST_FP8_CAPABILITY // 10}.0 or newer, "
            f"but this device has {major}.{minor}; leave it out"
        )
    if like.dtype != torch.bfloat16:
        raise OptionError(f"quantization fp8 needs dtype bfloat16, but it is {like.dtype}")
