"""Arguments of attention launches for cross-compilation; nothing reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.paged_layer import PagedLayer

ROWS = 48
MAX_SPLITS = 4
SPLIT_SIZE = 256


class Layer(NamedTuple):
    """Sizes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


LAYERS = (
    Layer(32, 8, 128),  # Llama 3 8B, Qwen3 8B
    Layer(9, 3, 64),  # SmolLM2 135M
    Layer(32, 32, 96),  # Phi-3 mini
    Layer(16, 8, 256),  # Gemma 2 9B
    Layer(64, 8, 64),  # GPT-OSS
    Layer(32, 32, 80),
    Layer(64, 1, 128),
    Layer(71, 1, 256),
)


def integers(*shape: int) -> torch.Tensor:
    """An uninitialised int32 tensor."""
    return torch.empty(shape, dtype=torch.int32)


def kv_dtypes(dtype: torch.dtype, quick: bool) -> list[torch.dtype]:
    """Dtypes of pools for queries of a dtype."""
    return [dtype] if quick else [dtype, FP8]


def paged(
    layer: Layer, dtype: torch.dtype, window: int | None = None, extras: bool = False
) -> PagedLayer:
    """A layer over pools of a dtype, both planes of one tensor; `extras`: soft cap and sinks."""
    both = torch.empty((2, 64, 16, layer.num_kv_heads, layer.head_dim), dtype=dtype)
    scale = 0.5 if dtype == FP8 else 1.0
    return PagedLayer(
        keys=both[0],
        values=both[1],
        page_tables=integers(64, 512),
        scale=0.1,
        window=window,
        soft_cap=50.0 if extras else None,
        sinks=torch.empty(layer.num_heads) if extras else None,
        key_scale=scale,
        value_scale=scale,
    )


def matrix(quick: bool) -> list[tuple[Layer, torch.dtype, torch.dtype, int | None, bool]]:
    """Layers, dtypes of queries and pools, windows and extras that are compiled."""
    if quick:
        return [(LAYERS[0], torch.bfloat16, torch.bfloat16, None, False)]
    found = []
    for layer in LAYERS:
        for pool_dtype in (torch.bfloat16, FP8):
            found.append((layer, torch.bfloat16, pool_dtype, None, False))
        found.append((layer, torch.bfloat16, torch.bfloat16, 4096, True))
    for layer in LAYERS[:2]:
        found.append((layer, torch.float16, torch.float16, None, True))
        found.append((layer, torch.float16, FP8, 4096, False))
        found.append((layer, torch.float32, torch.float32, 128, True))
    found.append((LAYERS[3], torch.float32, torch.float32, None, False))
    found.append((LAYERS[6], torch.float32, torch.float32, None, False))
    return found


def may_spill(layer: Layer, dtype: torch.dtype, pool_dtype: torch.dtype, capability: int) -> bool:
    """Where a few bytes of stack do not matter: what is there to compute right, not fast.

    That is fp8 that the device cannot convert, and products of float32 for large groups.
    """
    software_fp8 = pool_dtype == FP8 and capability < 89
    return software_fp8 or (dtype == torch.float32 and layer.num_heads > 16 * layer.num_kv_heads)
