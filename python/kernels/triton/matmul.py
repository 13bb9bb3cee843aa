"""The linear of the deterministic mode: one tile and one order over K for any number of rows.

The bits of a sum depend on the tile. cuBLAS chooses it by the number of rows; here it depends on
dtypes alone, K is never split, rows that do not exist are zero: bits are the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton import launch
from trunkline.kernels.triton.launch import FP8, ceil_div, check_fp8, dot, narrow


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """A tile and how it is computed."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


GROUP_M = 8  # tiles of rows that run next to each other, so that weights are read from the cache

# By bytes of an element: 64 rows fill a warp group's instruction and leave a batch of few rows
# bound by the weights' bytes; narrow tiles let a small N fill the device.
CONFIGS = {
    1: MatmulConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4),
    2: MatmulConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=5),
    4: MatmulConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=3),
}


def fixed_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
) -> None:
    """`out = residual + (x weight^T + bias)`, rounded once, at the end.

    Args:
        x: [M, K] float32, bfloat16, float16 or fp8, rows contiguous.
        weight: [N, K] of the same dtype, rows contiguous.
        bias: [N], any float dtype.
        residual: [M, N], any float dtype, rows contiguous; may be `out`.
        out: [M, N] float32, bfloat16 or float16, rows contiguous.
        x_scales: [M] float32, exactly when `x` is fp8.
        weight_scales: [N] float32, exactly when `x` is fp8.
    """
    rows, width = x.shape
    columns = weight.shape[0]
    _check(x, weight, out, (x_scales, weight_scales))
    if residual is not None and (residual.shape != out.shape or residual.stride(1) != 1):
        raise ValueError(f"residual is {tuple(residual.shape)}, out is {tuple(out.shape)}")
    if rows == 0:
        return
    config = CONFIGS[x.element_size()]
    grid = (ceil_div(rows, config.block_m) * ceil_div(columns, config.block_n),)
    _fixed_matmul_kernel[grid](
        x,
        weight,
        bias,
        residual,
        out,
        x_scales,
        weight_scales,
        rows,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        N=columns,
        K=width,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=GROUP_M,
        num_warps=config.num_warps,
        **_pipeline(config, x),
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    if weight.shape[1] != x.shape[1] or out.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not "
            "fit: [M, K], [N, K] and [M, N]"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, weight is {weight.dtype}: they must be the same")
    if x.stride(1) != 1 or weight.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the rows of x, weight and out must be contiguous")
    if any((x.dtype == FP8) != (scale is not None) for scale in scales):
        raise ValueError(f"scales of x and weight go with {FP8}, not with {x.dtype}")
    if x.dtype == FP8:
        check_fp8(x.device)


@triton.jit
def load_tile(row_pointers, rows_inside, start, offsets_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Elements [start, start + BLOCK_K) of rows, [rows, BLOCK_K], zero where there are none."""
    inside = rows_inside[:, None]
    if K % BLOCK_K != 0:
        inside = inside & (start + offsets_k < K)[None, :]
    return tl.load(row_pointers[:, None] + (start + offsets_k)[None, :], mask=inside, other=0.0)


@triton.jit
def add_product(accumulator, a, b, PROMOTE: tl.constexpr):
    """`accumulator + a b^T`; with `PROMOTE` the product is summed apart and then added.

    Tensor cores of capability 9.0 keep few bits in sums of fp8 products.
    """
    if PROMOTE:
        return accumulator + dot(a, tl.trans(b), tl.zeros_like(accumulator))
    return dot(a, tl.trans(b), accumulator)


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_matmul_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    residual_pointer,
    out_pointer,
    x_scales_pointer,
    weight_scales_pointer,
    num_rows,
    x_stride,
    weight_stride,
    residual_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # Tiles in groups: GROUP_M tiles of rows for a tile of columns, then the next columns.
    program = tl.program_id(0)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first_m = program // (GROUP_M * tiles_n) * GROUP_M
    group = tl.minimum(tiles_m - first_m, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    rows = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_inside = rows < num_rows
    columns_inside = columns < N

    x_rows = x_pointer + rows.to(tl.int64) * x_stride
    weight_rows = weight_pointer + columns.to(tl.int64) * weight_stride
    offsets_k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        x = load_tile(x_rows, rows_inside, start, offsets_k, K, BLOCK_K)
        weight = load_tile(weight_rows, columns_inside, start, offsets_k, K, BLOCK_K)
        accumulator = add_product(accumulator, x, weight, x_scales_pointer is not None)

    if x_scales_pointer is not None:
        x_scales = tl.load(x_scales_pointer + rows, mask=rows_inside, other=0.0)
        weight_scales = tl.load(weight_scales_pointer + columns, mask=columns_inside, other=0.0)
        accumulator *= x_scales[:, None] * weight_scales[None, :]
    if bias_pointer is not None:
        bias = tl.load(bias_pointer + columns, mask=columns_inside, other=0.0).to(tl.float32)
        accumulator += bias[None, :]
    inside = rows_inside[:, None] & columns_inside[None, :]
    if residual_pointer is not None:
        residual_rows = residual_pointer + rows.to(tl.int64) * residual_stride
        residuals = residual_rows[:, None] + columns[None, :]
        accumulator += tl.load(residuals, mask=inside, other=0.0).to(tl.float32)
    outs = (out_pointer + rows.to(tl.int64) * out_stride)[:, None] + columns[None, :]
    tl.store(outs, narrow(accumulator, out_pointer.dtype.element_ty), mask=inside)


def _pipeline(config: MatmulConfig, x: torch.Tensor) -> dict[str, int | None]:
    """Stages of the loop over K and the bound on registers with which the assembler spills none.

    Two programs of five stages of two-byte elements fill the shared memory from capability 9.0 on:
    there more registers cost nothing.
    """
    if x.element_size() != 2:
        return {"num_stages": config.num_stages}
    if launch.device_traits(x.device).capability < 90:
        return {"num_stages": config.num_stages - 1}
    return {"num_stages": config.num_stages, "maxnreg": launch.ALL_REGISTERS}
