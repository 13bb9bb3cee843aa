"""Launches of prompt attention."""

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
from trunkline.kernels.triton.launch import DeviceTraits
from trunkline.kernels.triton.prompt_attention import prompt_attention


def _prompt(
    layer: Layer,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    window: int | None,
    extras: bool,
    max_query_len: int,
    max_splits: int,
) -> None:
    shape = (ROWS * max_query_len, layer.num_heads, layer.head_dim)
    query = torch.empty(shape, dtype=dtype)
    prompt_attention(
        query,
        paged(layer, pool_dtype, window, extras),
        integers(ROWS),
        integers(ROWS),
        integers(ROWS + 1),
        query,
        torch.empty(workspace_elements(*shape, max_splits)),
        max_query_len=max_query_len,
        split_size=SPLIT_SIZE,
        max_splits=max_splits,
    )


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Every block size whole, and the least also in splits."""
    for layer, dtype, pool_dtype, window, extras in matrix(quick):
        group = layer.num_heads // layer.num_kv_heads
        for rows, max_splits in ((128, 1),) if quick else ((128, 1), (64, 1), (16, MAX_SPLITS)):
            name = f"{layer} {dtype} over {pool_dtype} window={window} extras={extras}"
            arguments = (
                layer,
                dtype,
                pool_dtype,
                window,
                extras,
                max(1, rows // group),
                max_splits,
            )
            spills = may_spill(layer, dtype, pool_dtype, traits.capability)
            yield Launch(f"{name} rows={rows}", partial(_prompt, *arguments), spills)
