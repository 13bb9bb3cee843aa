"""Launches of unified attention."""

from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch
from tests.kernels.triton.kv_tensors import (
    ROWS,
    Layer,
    integers,
    matrix,
    may_spill,
    paged,
)

from trunkline.kernels.triton.launch import DeviceTraits
from trunkline.kernels.triton.unified_attention import unified_attention


def _attend(
    layer: Layer, dtype: torch.dtype, pool_dtype: torch.dtype, window: int | None, extras: bool
) -> None:
    query = torch.empty((ROWS, layer.num_heads, layer.head_dim), dtype=dtype)
    unified_attention(
        query,
        paged(layer, pool_dtype, window, extras),
        integers(ROWS),
        integers(ROWS),
        integers(ROWS + 1),
        query,
        torch.empty(1),
    )


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """There is one binary per layer; the sum of splits is compiled with decode attention."""
    for layer, dtype, pool_dtype, window, extras in matrix(quick):
        name = f"{layer} {dtype} over {pool_dtype} window={window} extras={extras}"
        arguments = (layer, dtype, pool_dtype, window, extras)
        spills = may_spill(layer, dtype, pool_dtype, traits.capability)
        yield Launch(name, partial(_attend, *arguments), spills)
