"""Launches of the norms."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch

from trunkline.kernels.triton.launch import FP8, DeviceTraits
from trunkline.kernels.triton.norm import PostNorm, add_normed, add_rms_norm, rms_norm

ROWS = 48


def _norm(width: int, x: torch.dtype, out: torch.dtype, gathered: bool) -> None:
    rms_norm(
        torch.empty((ROWS, width), dtype=x),
        torch.empty(width),
        1e-6,
        torch.empty((ROWS, width), dtype=out),
        scales=torch.empty(ROWS) if out == FP8 else None,
        rows=torch.empty(ROWS, dtype=torch.int32) if gathered else None,
    )


def _add(width: int, x: torch.dtype, residual: torch.dtype, out: torch.dtype) -> None:
    add_rms_norm(
        torch.empty((ROWS, width), dtype=x),
        torch.empty((ROWS, width), dtype=residual),
        torch.empty(width),
        1e-6,
        torch.empty((ROWS, width), dtype=out),
        scales=torch.empty(ROWS) if out == FP8 else None,
    )


def _add_normed(width: int, x: torch.dtype, out: torch.dtype | None) -> None:
    rows, residual = torch.empty((ROWS, width), dtype=x), torch.empty(ROWS, width)
    post_norm = PostNorm(torch.empty(width), 1e-6)
    if out is None:
        add_normed(rows, residual, post_norm)
    else:
        normed = torch.empty((ROWS, width), dtype=out)
        add_rms_norm(rows, residual, torch.empty(width), 1e-6, normed, post_norm=post_norm)


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Widths of models from 135M to 405B; fp8 from capability 8.9 on."""
    dtypes = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32)
    for width, x in itertools.product(
        (576, 4096) if quick else (64, 576, 4096, 5120, 16384), dtypes
    ):
        outs = [x] if traits.capability < 89 else [x, FP8]
        for out, gathered in itertools.product(outs, (True,) if quick else (False, True)):
            name = f"rms {width} {x} -> {out} gathered={gathered}"
            yield Launch(name, partial(_norm, width, x, out, gathered))
        for added in (None, x):
            yield Launch(f"add normed {width} {x} {added}", partial(_add_normed, width, x, added))
        residuals = {x, torch.float32} - ({x} if quick else set())
        for out, residual in itertools.product(outs, sorted(residuals, key=str)):
            name = f"add {width} {x} + {residual} -> {out}"
            yield Launch(name, partial(_add, width, x, residual, out))
