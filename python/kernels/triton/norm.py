"""RMS norm of rows, alone or after adding to the residual stream; one program per row.

The norm is of the residual as it is stored, so `add_rms_norm` gives the bits that an addition and
`rms_norm` give one after another; what is added may be normed itself. With an fp8 `out`, each row
gets a scale of its own.
"""

from __future__ import annotations

from typing import NamedTuple

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

MAX_WIDTH = 32768
ELEMENTS_PER_WARP = 512
MAX_WARPS = 16


class PostNorm(NamedTuple):
    """The norm that something goes through before it is added to the residual stream."""

    weight: torch.Tensor  # [width] float32
    epsilon: float


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> None:
    """`out = x / rms(x) * weight`, in float32 until the end.

    Args:
        x: [n, width], any float dtype, rows contiguous.
        weight: [width] float32.
        epsilon: added to the mean of squares.
        out: [m, width]; m = n, or the number of `rows`.
        scales: [m] float32, exactly when `out` is fp8: `out * scales` is the result.
        rows: [m] int32, the rows of `x` that are wanted; all of them without it.
    """
    num_rows = out.shape[0] if rows is None else rows.shape[0]
    _check(x, weight, out, scales)
    if num_rows == 0:
        return
    _rms_norm_kernel[(num_rows,)](
        x,
        x,
        None,
        weight,
        rows,
        out,
        scales,
        x.stride(0),
        x.stride(0),
        out.stride(0),
        0.0,
        epsilon,
        WIDTH=x.shape[1],
        BLOCK=next_power_of_2(x.shape[1]),
        ADD=False,
        num_warps=_num_warps(x.shape[1]),
    )


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    post_norm: PostNorm | None = None,
) -> None:
    """`residual += x`, in place and rounded to its dtype, then `rms_norm(residual)`.

    Args:
        x: [n, width], any float dtype, rows contiguous.
        residual: [n, width], any float dtype, rows contiguous; overwritten.
        weight: as for `rms_norm`, like the rest.
        epsilon: added to the mean of squares.
        out: [n, width]; may be `x`.
        scales: [n] float32, exactly when `out` is fp8.
        post_norm: what `x` goes through, in float32, before it is added.
    """
    _check(x, weight, out, scales)
    _add(x, residual, post_norm, (weight, epsilon, out, scales))


def add_normed(x: torch.Tensor, residual: torch.Tensor, post_norm: PostNorm) -> None:
    """`residual += rms_norm(x)`, as `add_rms_norm` does it."""
    _check_width(x)
    if x.stride(1) != 1:
        raise ValueError("the rows of x must be contiguous")
    _add(x, residual, post_norm, (None, 0.0, None, None))


def _add(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_norm: PostNorm | None,
    norm: tuple[torch.Tensor | None, float, torch.Tensor | None, torch.Tensor | None],
) -> None:
    weight, epsilon, out, scales = norm
    if residual.shape != x.shape or residual.stride(1) != 1:
        raise ValueError(f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    if post_norm is not None and post_norm.weight.shape != x.shape[1:]:
        raise ValueError(f"x is {x.shape[1]} wide, its norm's weight {post_norm.weight.shape[0]}")
    if x.shape[0] == 0:
        return
    _rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        None if post_norm is None else post_norm.weight,
        weight,
        None,
        out,
        scales,
        x.stride(0),
        residual.stride(0),
        0 if out is None else out.stride(0),
        0.0 if post_norm is None else post_norm.epsilon,
        epsilon,
        WIDTH=x.shape[1],
        BLOCK=next_power_of_2(x.shape[1]),
        ADD=True,
        num_warps=_num_warps(x.shape[1]),
    )


def _num_warps(width: int) -> int:
    return min(MAX_WARPS, max(1, next_power_of_2(width) // ELEMENTS_PER_WARP))


def _check(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None
) -> None:
    _check_width(x)
    width = x.shape[1]
    if weight.shape != (width,) or out.shape[1] != width:
        raise ValueError(
            f"x is {width} wide, weight {tuple(weight.shape)} and out {tuple(out.shape)}"
        )
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the rows of x and out must be contiguous")
    if (out.dtype == FP8) != (scales is not None):
        raise ValueError(f"scales go with an out of {FP8}, not of {out.dtype}")


def _check_width(x: torch.Tensor) -> None:
    if x.shape[1] > MAX_WIDTH:
        raise ValueError(f"a norm over {x.shape[1]} elements is too wide: at most {MAX_WIDTH}")


@triton.jit
def _rms_norm_kernel(
    x_pointer,
    residual_pointer,
    post_weight_pointer,
    weight_pointer,
    rows_pointer,
    out_pointer,
    scales_pointer,
    x_stride,
    residual_stride,
    out_stride,
    post_epsilon,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if rows_pointer is not None:
        source = tl.load(rows_pointer + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_pointer + source * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residuals = residual_pointer + source * residual_stride + columns
        residual = tl.load(residuals, mask=inside, other=0.0).to(tl.float32)
        if post_weight_pointer is None:
            x += residual
        else:
            post_weight = tl.load(post_weight_pointer + columns, mask=inside, other=0.0)
            inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + post_epsilon)
            # Spelt out, so that every launch rounds once here, with and without an output.
            x = tl.fma(x * inverse_rms, post_weight, residual)
        stored = narrow(x, residual_pointer.dtype.element_ty)
        tl.store(residuals, stored, mask=inside)
        x = stored.to(tl.float32)
    if out_pointer is not None:
        mean_square = tl.sum(x * x, axis=0) / WIDTH
        weight = tl.load(weight_pointer + columns, mask=inside, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(mean_square + epsilon) * weight
        if scales_pointer is not None:
            scale = tl.maximum(tl.max(tl.abs(y), axis=0) / FP8_MAX, FP8_LEAST_SCALE)
            tl.store(scales_pointer + row, scale)
            y = tl.clamp(y / scale, -FP8_MAX, FP8_MAX)
        outs = out_pointer + row * out_stride + columns
        tl.store(outs, narrow(y, out_pointer.dtype.element_ty), mask=inside)
