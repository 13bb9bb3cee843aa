"""Launches of the rotary encoding with its KV write."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch
from tests.kernels.triton.kv_tensors import LAYERS, ROWS, Layer, integers, kv_dtypes, paged

from trunkline.kernels.triton.launch import DeviceTraits
from trunkline.kernels.triton.rotary import rotate_and_write


def _rotate(
    layer: Layer, dtype: torch.dtype, pool_dtype: torch.dtype, normed: bool, rotary_dim: int
) -> None:
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    weight = torch.empty(layer.head_dim) if normed else None
    rotate_and_write(
        torch.empty((ROWS, width), dtype=dtype),
        torch.empty((4096, rotary_dim)),
        weight,
        weight,
        1e-6,
        paged(layer, pool_dtype),
        integers(ROWS),
        integers(ROWS),
        torch.empty((ROWS, layer.num_heads, layer.head_dim), dtype=dtype),
    )


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """With and without norm; whole, three quarters and no rotation."""
    dtypes = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32)
    for layer, dtype in itertools.product(LAYERS[:1] if quick else LAYERS[:4], dtypes):
        shares = (1.0,) if quick else (1.0, 0.75, 0.0)
        normed = (True,) if quick else (True, False)
        for pool_dtype, norm, share in itertools.product(kv_dtypes(dtype, quick), normed, shares):
            dim = int(layer.head_dim * share) // 2 * 2
            name = f"{layer} {dtype} -> {pool_dtype} normed={norm} rotary_dim={dim}"
            yield Launch(name, partial(_rotate, layer, dtype, pool_dtype, norm, dim))
