"""Launches of the deterministic linear."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch

from trunkline.kernels.triton.launch import FP8, DeviceTraits
from trunkline.kernels.triton.matmul import fixed_matmul

ROWS = 200


def _matmul(
    shape: tuple[int, int], dtype: torch.dtype, out: torch.dtype, bias: bool, residual: bool
) -> None:
    columns, width = shape
    scaled = dtype == FP8
    fixed_matmul(
        torch.empty((ROWS, width), dtype=dtype),
        torch.empty((columns, width), dtype=dtype),
        torch.empty(columns, dtype=out) if bias else None,
        torch.empty((ROWS, columns)) if residual else None,
        torch.empty((ROWS, columns), dtype=out),
        x_scales=torch.empty(ROWS) if scaled else None,
        weight_scales=torch.empty(columns) if scaled else None,
    )


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Aligned and ragged shapes, with every epilogue."""
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    if traits.capability >= 89:
        dtypes.append(FP8)
    shapes = [(4096, 4096)] if quick else [(4096, 4096), (600, 576), (151936, 1000)]
    epilogues = [(True, True)] if quick else list(itertools.product((False, True), repeat=2))
    for dtype, shape in itertools.product(dtypes, shapes):
        narrow_out = torch.bfloat16 if dtype == FP8 else dtype
        for out in (torch.float32,) if quick else {narrow_out, torch.float32}:
            for bias, residual in epilogues:
                name = f"{dtype} {shape} -> {out} bias={bias} residual={residual}"
                yield Launch(name, partial(_matmul, shape, dtype, out, bias, residual))
