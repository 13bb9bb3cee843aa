"""The activation of a gated MLP: `act(gate) * up` of `[gate | up]`."""

from __future__ import annotations

import math
from typing import get_args

import torch
import triton
import triton.language as tl

from trunkline.kernels.specs import ActivationName
from trunkline.kernels.triton.launch import (
    FP8,
    FP8_LEAST_SCALE,
    FP8_MAX,
    ceil_div,
    narrow,
    next_power_of_2,
)

BLOCK = 1024  # columns of one program without scales
SCALED_BLOCK = 4096  # columns of one pass over a row that gets a scale
ELEMENTS_PER_WARP = 256
# gelu by tanh is 0.5 x (1 + tanh(scale * (x + cubic * x^3))).
GELU_SCALE = tl.constexpr(math.sqrt(2.0 / math.pi))
GELU_CUBIC = tl.constexpr(0.044715)


def gate_up(
    x: torch.Tensor,
    activation: ActivationName,
    out: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """`out = act(gate) * up`; `act(gate)` is rounded to the dtype of `x` before the product.

    Args:
        x: [n, 2 * width], any float dtype, rows contiguous: gates, then ups.
        activation: of the gates.
        out: [n, width].
        scales: [n] float32, exactly when `out` is fp8: `out * scales` is the result.
    """
    num_rows, width = out.shape
    check_activation(activation)
    if x.shape != (num_rows, 2 * width) or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)}, out {tuple(out.shape)}: x must be twice as wide, and the rows "
            "of both contiguous"
        )
    if (out.dtype == FP8) != (scales is not None):
        raise ValueError(f"scales go with an out of {FP8}, not of {out.dtype}")
    if num_rows == 0:
        return
    if scales is None:
        block = min(BLOCK, next_power_of_2(width))
        _gate_up_kernel[(num_rows, ceil_div(width, block))](
            x,
            out,
            x.stride(0),
            out.stride(0),
            ACTIVATION=activation,
            WIDTH=width,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    else:
        block = min(SCALED_BLOCK, next_power_of_2(width))
        _scaled_gate_up_kernel[(num_rows,)](
            x,
            out,
            scales,
            x.stride(0),
            out.stride(0),
            ACTIVATION=activation,
            WIDTH=width,
            BLOCK=block,
            num_warps=_num_warps(block),
        )


def check_activation(activation: str) -> None:
    """Refuse what `gated_product` does not know.

    Raises:
        ValueError: the activation is not one of the vocabulary's.
    """
    known = get_args(ActivationName)
    if activation not in known:
        raise ValueError(f"activation {activation!r} is not known; known: {', '.join(known)}")


def _num_warps(block: int) -> int:
    return max(1, block // ELEMENTS_PER_WARP)


@triton.jit
def gated_product(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """`act(gate)`, rounded to `dtype`, times `up`; all float32."""
    if ACTIVATION == "silu":
        exponent = -gate
    else:
        # 1 + tanh u = 2 / (1 + exp(-2 u)); the cube soon takes exp beyond float32.
        exponent = (gate + gate * gate * gate * GELU_CUBIC) * (-2.0 * GELU_SCALE)
        exponent = tl.minimum(exponent, 80.0)
    return narrow(gate / (1.0 + tl.exp(exponent)), dtype).to(tl.float32) * up


@triton.jit
def _load_product(row_pointer, columns, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr):
    inside = columns < WIDTH
    gate = tl.load(row_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row_pointer + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    return gated_product(gate, up, row_pointer.dtype.element_ty, ACTIVATION)


@triton.jit
def _gate_up_kernel(
    x_pointer,
    out_pointer,
    x_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product = _load_product(x_pointer + row * x_stride, columns, ACTIVATION, WIDTH)
    outs = out_pointer + row * out_stride + columns
    tl.store(outs, narrow(product, out_pointer.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _scaled_gate_up_kernel(
    x_pointer,
    out_pointer,
    scales_pointer,
    x_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        product = _load_product(x_pointer + row * x_stride, columns, ACTIVATION, WIDTH)
        largest = tl.maximum(largest, tl.abs(product))
    scale = tl.maximum(tl.max(largest, axis=0) / FP8_MAX, FP8_LEAST_SCALE)
    tl.store(scales_pointer + row, scale)
    # The row is in the cache now: computing it again is cheaper than keeping it.
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        product = _load_product(x_pointer + row * x_stride, columns, ACTIVATION, WIDTH)
        scaled = tl.clamp(product / scale, -FP8_MAX, FP8_MAX)
        outs = out_pointer + row * out_stride + columns
        tl.store(outs, narrow(scaled, out_pointer.dtype.element_ty), mask=columns < WIDTH)
