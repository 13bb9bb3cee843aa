"""Launches of page moves."""

from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch
from tests.kernels.triton.kv_tensors import LAYERS, Layer, integers, kv_dtypes

from trunkline.kernels.triton.launch import DeviceTraits
from trunkline.kernels.triton.page_copy import copy_pages


def _copy(layer: Layer, dtype: torch.dtype) -> None:
    shape = (4, 2, 64, 16, layer.num_kv_heads, layer.head_dim)
    copy_pages(torch.empty(shape, dtype=dtype), integers(16, 3))


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Pools of all dtypes."""
    for layer in LAYERS[:1] if quick else LAYERS[:3]:
        for dtype in kv_dtypes(torch.bfloat16, quick):
            yield Launch(f"{layer} {dtype}", partial(_copy, layer, dtype))
