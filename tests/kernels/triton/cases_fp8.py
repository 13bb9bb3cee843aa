"""Launches of the quantisation of activations."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch

from trunkline.kernels.triton.fp8 import quantize_rows
from trunkline.kernels.triton.launch import FP8, DeviceTraits

ROWS = 48


def _quantize(width: int, dtype: torch.dtype) -> None:
    x, out = torch.empty((ROWS, width), dtype=dtype), torch.empty((ROWS, width), dtype=FP8)
    quantize_rows(x, out, torch.empty(ROWS))


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Only where there is fp8."""
    if traits.capability < 89:
        return
    dtypes = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32)
    for width, dtype in itertools.product((4096,) if quick else (576, 4096, 28672), dtypes):
        yield Launch(f"quantize {width} {dtype}", partial(_quantize, width, dtype))
