"""Launches of decode attention and of the sum of its splits."""

from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch
from tests.kernels.triton.kv_tensors import (
    MAX_SPLITS,
    ROWS,
    SPLIT_SIZE,
    Layer,
    integers,
    matrix,
    may_spill,
    paged,
)

from trunkline.kernels.triton.attention_parts import workspace_elements
from trunkline.kernels.triton.decode_attention import decode_attention
from trunkline.kernels.triton.launch import DeviceTraits


def _decode(
    layer: Layer,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    window: int | None,
    extras: bool,
    max_splits: int,
) -> None:
    shape = (ROWS, layer.num_heads, layer.head_dim)
    query = torch.empty(shape, dtype=dtype)
    decode_attention(
        query,
        paged(layer, pool_dtype, window, extras),
        integers(ROWS),
        integers(ROWS),
        query,
        torch.empty(workspace_elements(*shape, max_splits)),
        split_size=SPLIT_SIZE,
        max_splits=max_splits,
    )


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Every tile size; in splits and whole."""
    for layer, dtype, pool_dtype, window, extras in matrix(quick):
        for max_splits in (MAX_SPLITS,) if quick else (1, MAX_SPLITS):
            name = f"{layer} {dtype} over {pool_dtype} window={window} extras={extras}"
            arguments = (layer, dtype, pool_dtype, window, extras, max_splits)
            spills = may_spill(layer, dtype, pool_dtype, traits.capability)
            yield Launch(f"{name} splits={max_splits}", partial(_decode, *arguments), spills)
