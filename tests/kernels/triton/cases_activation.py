"""Launches of the gate/up activation."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch
from tests.kernels.triton.cross_compile import Launch

from trunkline.kernels.specs import ActivationName
from trunkline.kernels.triton.activation import gate_up
from trunkline.kernels.triton.launch import FP8, DeviceTraits

ROWS = 48


def _gate_up(activation: ActivationName, width: int, x: torch.dtype, out: torch.dtype) -> None:
    gate_up(
        torch.empty((ROWS, 2 * width), dtype=x),
        activation,
        torch.empty((ROWS, width), dtype=out),
        scales=torch.empty(ROWS) if out == FP8 else None,
    )


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Widths of models from 135M to 405B."""
    dtypes = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32)
    widths = (14336,) if quick else (96, 1536, 14336, 53248)
    for kind, width, x in itertools.product(get_args(ActivationName), widths, dtypes):
        for out in [x] if traits.capability < 89 else [x, FP8]:
            yield Launch(f"{kind} {width} {x} -> {out}", partial(_gate_up, kind, width, x, out))
