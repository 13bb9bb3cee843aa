"""Launches of routing, grouped products and combination."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch

from trunkline.kernels.triton import moe
from trunkline.kernels.triton.launch import FP8, DeviceTraits
from trunkline.kernels.triton.moe import ExpertWeights, combine, expert_down, expert_gate_up
from trunkline.kernels.triton.routing import expert_order, route

TOKENS = 48


@dataclass(frozen=True)
class Shape:
    """Of one layer's experts."""

    experts: int
    top_k: int
    hidden: int
    width: int


SHAPES = (Shape(128, 8, 2048, 768), Shape(8, 2, 4096, 14336), Shape(6, 3, 72, 40))


def _route(shape: Shape, dtype: torch.dtype, renormalise: bool) -> None:
    route(torch.empty((TOKENS, shape.experts), dtype=dtype), shape.top_k, renormalise)


def _products(shape: Shape, dtype: torch.dtype, block_m: int) -> None:
    scaled = dtype == FP8
    pairs = TOKENS * shape.top_k
    weights = ExpertWeights(
        torch.empty((shape.experts, 2 * shape.width, shape.hidden), dtype=dtype),
        torch.empty((shape.experts, shape.hidden, shape.width), dtype=dtype),
        torch.empty((shape.experts, 2 * shape.width)) if scaled else None,
        torch.empty((shape.experts, shape.hidden)) if scaled else None,
    )
    chosen = torch.empty((TOKENS, shape.top_k), dtype=torch.int32)
    order = expert_order(chosen, shape.experts, block_m)
    out = torch.bfloat16 if scaled else dtype
    x = torch.empty((TOKENS, shape.hidden), dtype=dtype)
    activated = torch.empty((pairs, shape.width), dtype=dtype)
    scales = torch.empty(TOKENS) if scaled else None
    expert_gate_up(x, scales, weights, order, "silu", torch.empty((pairs, shape.width), dtype=out))
    scales = torch.empty(pairs) if scaled else None
    expert_down(activated, scales, weights, order, torch.empty((pairs, shape.hidden), dtype=out))


def _combine(shape: Shape, dtype: torch.dtype, residual: torch.dtype | None) -> None:
    results = torch.empty((TOKENS * shape.top_k, shape.hidden), dtype=dtype)
    stream = torch.empty((TOKENS, shape.hidden), dtype=residual or dtype)
    shares = torch.empty((TOKENS, shape.top_k))
    combine(results, shares, None if residual is None else stream, stream)


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Shapes of Qwen3-30B-A3B, of Mixtral, and ragged ones."""
    dtypes = [torch.bfloat16] if quick else [torch.bfloat16, torch.float16, torch.float32]
    if traits.capability >= 89 and not quick:
        dtypes.append(FP8)
    shapes = SHAPES[:1] if quick else SHAPES
    for shape, renormalise in itertools.product(shapes, (True,) if quick else (False, True)):
        for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
            name = f"route {shape} {dtype} renormalise={renormalise}"
            yield Launch(name, partial(_route, shape, dtype, renormalise))
    for shape, dtype in itertools.product(shapes, dtypes):
        for block_m, size in moe.CONFIGS:
            if size == dtype.itemsize and not (quick and block_m == 128):
                name = f"experts {shape} {dtype} block_m={block_m}"
                yield Launch(name, partial(_products, shape, dtype, block_m))
        if dtype != FP8:
            for residual in (torch.float32,) if quick else (None, torch.float32, dtype):
                name = f"combine {shape} {dtype} residual={residual}"
                yield Launch(name, partial(_combine, shape, dtype, residual))
