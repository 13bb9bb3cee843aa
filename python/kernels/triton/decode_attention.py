"""Paged attention of one query token per row, its keys split over programs.

One program takes the query heads that share a kv head, padded to the 16 rows of a matrix product,
and one split of a row's keys; a second kernel sums the splits. Split lengths depend on a row's own
length and on `max_splits`, never on other rows. Rows of length 0 get zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.attention_parts import (
    add_keys,
    check_split_size,
    empty_state,
    merge,
    partial_results,
    store_nothing,
    store_output,
    store_partial,
)
from trunkline.kernels.triton.launch import ALL_REGISTERS, ceil_div, device_traits, next_power_of_2
from trunkline.kernels.triton.paged_layer import PagedLayer

MAX_BLOCK_ROWS = 64
MIN_BLOCK_ROWS = 16
PROGRAMS_PER_PROCESSOR = 2
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile of keys and pipeline of a program.

    Of `num_stages`, half load page numbers and half load keys and values: 5 keep two tiles of keys
    in flight, 3 keep one. `max_registers`: of a thread, None if the compiler chooses; see
    `ALL_REGISTERS`.
    """

    block_keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


CONFIGS = {  # by padded head dim and bytes of an element of queries
    (16, 2): DecodeConfig(block_keys=128, num_warps=4, num_stages=5),
    (32, 2): DecodeConfig(block_keys=128, num_warps=4, num_stages=5),
    (64, 2): DecodeConfig(block_keys=128, num_warps=4, num_stages=5),
    (128, 2): DecodeConfig(block_keys=64, num_warps=4, num_stages=5, max_registers=ALL_REGISTERS),
    (256, 2): DecodeConfig(block_keys=32, num_warps=4, num_stages=5),
    (16, 4): DecodeConfig(block_keys=64, num_warps=4, num_stages=3),
    (32, 4): DecodeConfig(block_keys=64, num_warps=4, num_stages=3),
    (64, 4): DecodeConfig(block_keys=64, num_warps=4, num_stages=3),
    (128, 4): DecodeConfig(block_keys=32, num_warps=4, num_stages=3),
    (256, 4): DecodeConfig(block_keys=16, num_warps=4, num_stages=3),
}


@triton.jit
def _key_range(kv_len, split, split_size, max_splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key to load, first key that is visible, and end, of one split of a row."""
    visible = 0
    if WINDOW > 0:
        visible = tl.maximum(kv_len - WINDOW, 0)
    base = visible // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(kv_len - base, max_splits), BLOCK_N) * BLOCK_N
    share = tl.maximum(share, split_size)
    start = base + split * share
    return start, visible, tl.minimum(start + share, kv_len)


@triton.jit(do_not_specialize=["split_size", "max_splits", "score_scale", "value_scale"])
def decode_kernel(
    query,
    key_pool,
    value_pool,
    page_stride,
    token_stride,
    head_stride,
    page_tables,
    table_stride,
    row_slot,
    kv_lens,
    sinks,
    out,
    partial_outputs,
    partial_totals,
    partial_exponents,
    split_size,
    max_splits,
    score_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IN_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: up to BLOCK_M query heads of one kv head, one row, one split."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    members = tl.program_id(0) % HEAD_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = members < GROUP
    heads = kv_head * GROUP + members
    dims = tl.arange(0, BLOCK_D)
    kv_len = tl.load(kv_lens + row)
    start, visible, end = _key_range(kv_len, split, split_size, max_splits, WINDOW, BLOCK_N)
    partial = (partial_outputs, partial_totals, partial_exponents)
    places = (row * NUM_HEADS + heads) * max_splits + split
    if IN_SPLITS:
        if start >= end:
            store_nothing(partial, places, exists)
            return
    here = (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + here, mask=inside, other=0.0)
    table = page_tables + tl.load(row_slot + row).to(tl.int64) * table_stride
    key_pool += kv_head * head_stride
    value_pool += kv_head * head_stride
    strides = (page_stride, token_stride)
    state = empty_state(BLOCK_M, BLOCK_D)
    for first in range(start, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        stored = keys < end
        if WINDOW > 0:
            stored = stored & (keys >= visible)
        state = add_keys(
            q, key_pool, value_pool, strides, table, keys, stored, stored[None, :], state,
            score_scale, HEAD_DIM, PAGE_SIZE, SOFT_CAP,
        )  # fmt: skip
    if IN_SPLITS:
        store_partial(partial, places, exists, state, HEAD_DIM)
    else:
        store_output(out, here, inside, sinks, heads, exists, state, value_scale)


def choose_max_splits(num_rows: int, num_kv_heads: int, num_processors: int) -> int:
    """Splits that keep a GPU busy with rows of any length; for `decode_attention`."""
    programs = PROGRAMS_PER_PROCESSOR * num_processors
    return max(1, min(MAX_SPLITS, programs // max(1, num_rows * num_kv_heads)))


def decode_attention(
    query: torch.Tensor,
    layer: PagedLayer,
    row_slot: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    split_size: int,
    max_splits: int,
) -> None:
    """Attend from the last position of each of R rows to all keys of the row.

    A row is cut into splits of `split_size` keys, or of more where `max_splits` would not do; with
    a window, only from the tile that its first key lies in. A row's result depends on nothing else
    in the batch.

    Args:
        query: [R, Hq, D], contiguous.
        layer: what is attended to.
        row_slot: [R] int32.
        kv_lens: [R] int32, the query's own key included; 0 for padding rows.
        out: [R, Hq, D], contiguous.
        workspace: flat float32, `workspace_elements(R, Hq, D, max_splits)`; unused for one split.
        split_size: least number of keys in a split, a multiple of 128.
        max_splits: see `choose_max_splits`.

    Raises:
        ValueError: an argument is not as described.
    """
    num_rows, num_heads, head_dim = query.shape
    layer.check(query.dtype, head_dim)
    check_split_size(split_size)
    constants = layer.constants(query)
    config = CONFIGS[constants["BLOCK_D"], query.element_size()]
    group = constants["GROUP"]
    block_rows = min(max(next_power_of_2(group), MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)
    partial = None
    if max_splits > 1:
        partial = partial_results(workspace, num_rows, num_heads, head_dim, max_splits)
    decode_kernel[(layer.num_kv_heads * ceil_div(group, block_rows), num_rows, max_splits)](
        query,
        *layer.pages(device_traits(query.device)),
        row_slot,
        kv_lens,
        layer.sinks,
        out,
        *(partial or (None, None, None)),
        split_size,
        max_splits,
        layer.score_scale,
        layer.value_scale,
        IN_SPLITS=partial is not None,
        BLOCK_M=block_rows,
        BLOCK_N=config.block_keys,
        **constants,
        num_warps=config.num_warps * (2 if block_rows == MAX_BLOCK_ROWS else 1),
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    if partial is not None:
        merge(partial, layer.sinks, None, out, max_splits, layer.value_scale)
