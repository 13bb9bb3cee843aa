"""Experts: grouped products over pairs sorted by expert, and their combination.

Each pair's result depends on its token and expert alone, and a token's results are added in the
order of its choices: with `deterministic` tiles, whose size does not depend on the batch, a token
has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from trunkline.kernels.specs import ActivationName
from trunkline.kernels.triton.activation import check_activation, gated_product
from trunkline.kernels.triton.fp8 import quantize_rows
from trunkline.kernels.triton.launch import FP8, ceil_div, check_fp8, narrow, next_power_of_2
from trunkline.kernels.triton.matmul import MatmulConfig, add_product, load_tile
from trunkline.kernels.triton.routing import ExpertOrder, expert_order, route

# By bytes of an element and rows of a tile. Few rows per expert: bound by the weights' bytes, so
# long loads and few rows. `gate_up` has two tiles of weights, so its columns count twice.
CONFIGS = {
    (config.block_m, size): config
    for size, configs in {
        1: (
            MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4),
            MatmulConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4),
            MatmulConfig(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=4),
        ),
        2: (
            MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3),
            MatmulConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4),
            MatmulConfig(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=4),
        ),
        4: (
            MatmulConfig(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=3),
            MatmulConfig(block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=3),
        ),
    }.items()
    for config in configs
}
DETERMINISTIC_BLOCK_M = 64
COMBINE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer."""

    gate_up: torch.Tensor  # [E, 2 * I, H]: of each expert the gates, then the ups
    down: torch.Tensor  # [E, H, I]
    gate_up_scales: torch.Tensor | None = None  # [E, 2 * I] float32, exactly when they are fp8
    down_scales: torch.Tensor | None = None  # [E, H] float32, exactly when they are fp8


def block_rows(num_pairs: int, num_experts: int, dtype: torch.dtype, deterministic: bool) -> int:
    """Rows of a tile that fit the mean number of pairs per expert."""
    if deterministic:
        return DETERMINISTIC_BLOCK_M
    mean = num_pairs / num_experts
    fitting = 16 if mean <= 16 else 64 if mean <= 96 else 128
    return fitting if (fitting, dtype.itemsize) in CONFIGS else DETERMINISTIC_BLOCK_M


def mixture(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    weights: ExpertWeights,
    residual: torch.Tensor,
    *,
    top_k: int,
    renormalise: bool,
    activation: ActivationName,
    deterministic: bool,
) -> None:
    """`residual += ` the weighted results of each token's experts.

    Args:
        x: [T, H] bfloat16, float16 or float32, contiguous; quantised here if the weights are.
        router_logits: [T, E].
        weights: of the experts.
        residual: [T, H], any float dtype, rows contiguous; overwritten.
        top_k: experts per token.
        renormalise: divide the chosen experts' weights by their sum.
        activation: of the experts.
        deterministic: tiles do not depend on the number of tokens.
    """
    num_tokens, hidden = x.shape
    num_experts, _, width = weights.down.shape
    experts, shares = route(router_logits, top_k, renormalise)
    num_pairs = num_tokens * top_k
    rows = block_rows(num_pairs, num_experts, weights.down.dtype, deterministic)
    order = expert_order(experts, num_experts, rows)
    activated = x.new_empty((num_pairs, width))
    expert_gate_up(*_operand(x, weights), weights, order, activation, activated)
    results = x.new_empty((num_pairs, hidden))
    expert_down(*_operand(activated, weights), weights, order, results)
    combine(results, shares, residual, residual)


def _operand(x: torch.Tensor, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`x` as the weights can be multiplied with it, and the scales of its rows."""
    if weights.down.dtype != FP8:
        return x, None
    quantised = torch.empty_like(x, dtype=FP8)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    quantize_rows(x, quantised, scales)
    return quantised, scales


def expert_gate_up(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weights: ExpertWeights,
    order: ExpertOrder,
    activation: ActivationName,
    out: torch.Tensor,
) -> None:
    """`out[pair] = act(gate) * up` of the pair's expert; gate, up and act(gate) are rounded.

    Args:
        x: [T, H] of the weights' dtype, rows contiguous.
        x_scales: [T] float32, exactly when `x` is fp8.
        weights: of the experts.
        order: of the pairs.
        activation: of the gates.
        out: [pairs, I] contiguous, not fp8.
    """
    check_activation(activation)
    double = weights.gate_up.shape[1]
    _check(x, weights.gate_up, out, (order, x_scales, weights.gate_up_scales))
    if order.num_pairs == 0:
        return
    if double != 2 * out.shape[1] or order.num_pairs % x.shape[0] != 0:
        raise ValueError(
            f"gate_up {tuple(weights.gate_up.shape)}, x {tuple(x.shape)} and out "
            f"{tuple(out.shape)} do not fit: [E, 2 * I, H], [T, H] and [T * top_k, I]"
        )
    _launch(
        _gate_up_kernel,
        (x, weights.gate_up, out, x_scales, weights.gate_up_scales),
        order,
        ACTIVATION=activation,
        TOP_K=order.num_pairs // x.shape[0],
    )


def expert_down(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weights: ExpertWeights,
    order: ExpertOrder,
    out: torch.Tensor,
) -> None:
    """`out[pair] = x[pair] down^T` of the pair's expert.

    Args:
        x: [pairs, I] of the weights' dtype, rows contiguous.
        x_scales: [pairs] float32, exactly when `x` is fp8.
        weights: of the experts.
        order: of the pairs.
        out: [pairs, H] contiguous, not fp8.
    """
    _check(x, weights.down, out, (order, x_scales, weights.down_scales))
    if weights.down.shape[1] != out.shape[1] or x.shape[0] != order.num_pairs:
        raise ValueError(
            f"down {tuple(weights.down.shape)}, x {tuple(x.shape)} and out {tuple(out.shape)} do "
            "not fit: [E, H, I], [pairs, I] and [pairs, H]"
        )
    if order.num_pairs == 0:
        return
    tensors = (x, weights.down, out, x_scales, weights.down_scales)
    _launch(_down_kernel, tensors, order)


def _launch(
    kernel: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, Any],
    order: ExpertOrder,
    **constants: int | str,
) -> None:
    """Launch a grouped product; `tensors`: x, weights, out, scales of x and of the weights."""
    x, _, out, *_ = tensors
    config = CONFIGS[order.block_m, x.element_size()]
    kernel[(order.block_experts.shape[0] * ceil_div(out.shape[1], config.block_n),)](
        *tensors,
        order.pairs,
        order.block_experts,
        order.num_pairs,
        x.stride(0),
        N=out.shape[1],
        K=x.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def combine(
    results: torch.Tensor, shares: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """`out = residual +` the pairs' results times their shares, added in the order of the choices.

    Args:
        results: [T * top_k, H], any float dtype, contiguous.
        shares: [T, top_k] float32, contiguous.
        residual: [T, H], any float dtype, rows contiguous; may be `out`.
        out: [T, H], rows contiguous.
    """
    num_tokens, top_k = shares.shape
    width = out.shape[1]
    if results.shape != (num_tokens * top_k, width) or out.shape[0] != num_tokens:
        raise ValueError(
            f"results {tuple(results.shape)}, shares {tuple(shares.shape)} and out "
            f"{tuple(out.shape)} do not fit: [T * top_k, H], [T, top_k] and [T, H]"
        )
    if num_tokens == 0:
        return
    block = min(COMBINE_BLOCK, next_power_of_2(width))
    _combine_kernel[(num_tokens, ceil_div(width, block))](
        results,
        shares,
        residual,
        out,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        TOP_K=top_k,
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rest: tuple[ExpertOrder, torch.Tensor | None, torch.Tensor | None],
) -> None:
    order, x_scales, weight_scales = rest
    if x.dtype != weight.dtype or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, the experts are {weight.dtype} "
            f"{tuple(weight.shape)}: dtype and last dimension must be the same"
        )
    if (order.block_m, x.element_size()) not in CONFIGS:
        raise ValueError(f"no tile of {order.block_m} rows of {x.dtype}; use block_rows")
    if x.stride(1) != 1 or not weight.is_contiguous() or not out.is_contiguous():
        raise ValueError("the rows of x must be contiguous, and so must experts and out")
    if out.shape[0] != order.num_pairs:
        raise ValueError(f"out has {out.shape[0]} rows for {order.num_pairs} pairs")
    if any((x.dtype == FP8) != (scale is not None) for scale in (x_scales, weight_scales)):
        raise ValueError(f"scales of x and experts go with {FP8}, not with {x.dtype}")
    if x.dtype == FP8:
        check_fp8(x.device)


@triton.jit
def _place(
    pairs_pointer,
    block_experts_pointer,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What a program multiplies: its expert (below 0: nothing), its pairs and its columns."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // tiles_n
    expert = tl.load(block_experts_pointer + block).to(tl.int64)
    pairs = tl.load(pairs_pointer + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    return expert, pairs, columns


@triton.jit
def _scaled(
    accumulator, x_scales_pointer, rows, rows_inside, weight_scales_pointer, columns, columns_inside
):
    """The accumulator times the scales of its rows and columns, where there are any."""
    if x_scales_pointer is not None:
        x_scales = tl.load(x_scales_pointer + rows, mask=rows_inside, other=0.0)
        scales = tl.load(weight_scales_pointer + columns, mask=columns_inside, other=0.0)
        accumulator *= x_scales[:, None] * scales[None, :]
    return accumulator


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_pointer,
    weight_pointer,
    out_pointer,
    x_scales_pointer,
    weight_scales_pointer,
    pairs_pointer,
    block_experts_pointer,
    num_pairs,
    x_stride,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, pairs, columns = _place(pairs_pointer, block_experts_pointer, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    rows_inside = pairs < num_pairs
    columns_inside = columns < N
    tokens = pairs // TOP_K

    x_rows = x_pointer + tokens * x_stride
    gate_rows = weight_pointer + (expert * 2 * N + columns) * K
    up_rows = gate_rows + N * K
    offsets_k = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    PROMOTE: tl.constexpr = x_scales_pointer is not None
    for start in range(0, K, BLOCK_K):
        x = load_tile(x_rows, rows_inside, start, offsets_k, K, BLOCK_K)
        gate_weight = load_tile(gate_rows, columns_inside, start, offsets_k, K, BLOCK_K)
        gate = add_product(gate, x, gate_weight, PROMOTE)
        up_weight = load_tile(up_rows, columns_inside, start, offsets_k, K, BLOCK_K)
        up = add_product(up, x, up_weight, PROMOTE)

    scales = weight_scales_pointer
    if PROMOTE:
        scales += expert * 2 * N
    gate = _scaled(gate, x_scales_pointer, tokens, rows_inside, scales, columns, columns_inside)
    if PROMOTE:
        scales += N
    up = _scaled(up, x_scales_pointer, tokens, rows_inside, scales, columns, columns_inside)
    dtype: tl.constexpr = out_pointer.dtype.element_ty
    gate = narrow(gate, dtype).to(tl.float32)
    product = gated_product(gate, narrow(up, dtype).to(tl.float32), dtype, ACTIVATION)
    outs = (out_pointer + pairs * N)[:, None] + columns[None, :]
    tl.store(outs, narrow(product, dtype), mask=rows_inside[:, None] & columns_inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    x_pointer,
    weight_pointer,
    out_pointer,
    x_scales_pointer,
    weight_scales_pointer,
    pairs_pointer,
    block_experts_pointer,
    num_pairs,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, pairs, columns = _place(pairs_pointer, block_experts_pointer, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    rows_inside = pairs < num_pairs
    columns_inside = columns < N

    x_rows = x_pointer + pairs * x_stride
    weight_rows = weight_pointer + (expert * N + columns) * K
    offsets_k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    PROMOTE: tl.constexpr = x_scales_pointer is not None
    for start in range(0, K, BLOCK_K):
        x = load_tile(x_rows, rows_inside, start, offsets_k, K, BLOCK_K)
        weight = load_tile(weight_rows, columns_inside, start, offsets_k, K, BLOCK_K)
        accumulator = add_product(accumulator, x, weight, PROMOTE)

    scales = weight_scales_pointer
    if PROMOTE:
        scales += expert * N
    accumulator = _scaled(
        accumulator, x_scales_pointer, pairs, rows_inside, scales, columns, columns_inside
    )
    outs = (out_pointer + pairs * N)[:, None] + columns[None, :]
    inside = rows_inside[:, None] & columns_inside[None, :]
    tl.store(outs, narrow(accumulator, out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def _combine_kernel(
    results_pointer,
    shares_pointer,
    residual_pointer,
    out_pointer,
    residual_stride,
    out_stride,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        share = tl.load(shares_pointer + pair)
        result = tl.load(results_pointer + pair * WIDTH + columns, mask=inside, other=0.0)
        total += share * result.to(tl.float32)
    if residual_pointer is not None:
        residuals = residual_pointer + token * residual_stride + columns
        total += tl.load(residuals, mask=inside, other=0.0).to(tl.float32)
    outs = out_pointer + token * out_stride + columns
    tl.store(outs, narrow(total, out_pointer.dtype.element_ty), mask=inside)
