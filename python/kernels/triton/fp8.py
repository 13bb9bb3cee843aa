"""Linears in fp8 (e4m3): weights with a scale per output channel, activations with one per row.

A row's scale depends on that row alone. The product is `torch._scaled_mm`, so its bits may depend
on the number of rows; `matmul.fixed_matmul` takes the same operands in the deterministic mode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.launch import (
    FP8,
    FP8_LEAST_SCALE,
    FP8_MAX,
    narrow,
    next_power_of_2,
)

BLOCK = 4096  # elements of one pass over a row
ELEMENTS_PER_WARP = 512
ALIGNMENT = 16  # of both sides of a weight: what the tensor cores' products take
QUANTIZED_ROWS = 1024  # of a weight at once: a float32 copy of all of it may not fit


def quantize_rows(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """`out * scales` is `x`, rounded; the largest element of each row becomes 448.

    Args:
        x: [n, width], any float dtype, rows contiguous.
        out: [n, width] fp8, rows contiguous.
        scales: [n] float32.
    """
    if out.shape != x.shape or out.dtype != FP8 or scales.shape != x.shape[:1]:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, scales {tuple(scales.shape)}: for x "
            f"{tuple(x.shape)} they must be {FP8} of its shape and one scale per row"
        )
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the rows of x and out must be contiguous")
    num_rows, width = x.shape
    if num_rows == 0:
        return
    block = min(BLOCK, next_power_of_2(width))
    _quantize_rows_kernel[(num_rows,)](
        x,
        out,
        scales,
        x.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=max(1, block // ELEMENTS_PER_WARP),
    )


def quantize_weight(weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise a weight when it is loaded; plain torch, on any device.

    Args:
        weight: [out_features, in_features], any float dtype and device.
        out: [out_features, in_features] fp8.
        scales: [out_features] float32, one per output channel.
    """
    if weight.shape != out.shape or scales.shape != weight.shape[:1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} does not fit out {tuple(out.shape)} and scales "
            f"{tuple(scales.shape)}"
        )
    for start in range(0, weight.shape[0], QUANTIZED_ROWS):
        rows = slice(start, start + QUANTIZED_ROWS)
        wide = weight[rows].to(out.device, torch.float32)
        largest = wide.abs().amax(-1, keepdim=True)
        scale = (largest / FP8_MAX.value).clamp_(min=FP8_LEAST_SCALE.value)
        scales[rows] = scale[:, 0]
        out[rows] = (wide / scale).clamp_(-FP8_MAX.value, FP8_MAX.value).to(FP8)


def scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`x weight^T + bias` of quantised operands.

    Args:
        x: [M, K] fp8, contiguous.
        x_scales: [M] float32.
        weight: [N, K] fp8, contiguous; K and N multiples of 16.
        weight_scales: [N] float32.
        bias: [N] of `dtype`.
        dtype: of the result; bfloat16 on CUDA, where cuBLAS and CUTLASS take no other with scales
            per row, else also float32.

    Returns:
        [M, N] of `dtype`.
    """
    if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT:
        raise ValueError(
            f"fp8 weights need both sides in multiples of {ALIGNMENT}, not {tuple(weight.shape)}; "
            "keep this one in bfloat16"
        )
    if x.device.type == "cuda" and dtype != torch.bfloat16:
        raise ValueError(f"fp8 linears yield bfloat16 on CUDA, not {dtype}; use --dtype bfloat16")
    if x.shape[0] == 0:
        return torch.empty((0, weight.shape[0]), dtype=dtype, device=x.device)
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scales[:, None],
        scale_b=weight_scales[None, :],
        bias=bias,
        out_dtype=dtype,
    )


@triton.jit
def _quantize_rows_kernel(
    x_pointer,
    out_pointer,
    scales_pointer,
    x_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    xs = x_pointer + row * x_stride
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(xs + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.maximum(tl.max(largest, axis=0) / FP8_MAX, FP8_LEAST_SCALE)
    tl.store(scales_pointer + row, scale)
    outs = out_pointer + row * out_stride
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(xs + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        scaled = tl.clamp(x / scale, -FP8_MAX, FP8_MAX)
        tl.store(outs + columns, narrow(scaled, out_pointer.dtype.element_ty), mask=columns < WIDTH)
