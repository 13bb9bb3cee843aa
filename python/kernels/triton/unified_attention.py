"""Paged causal attention with the same bits for a token in any batch, chunk or step.

One binary for prompts and decoding: a block of query rows and a tile of keys have one size,
whatever the lengths; every tile is masked in the same way. Keys are summed in splits of
`SPLIT_SIZE` at fixed absolute positions and the splits in ascending order. A program that has a
block for itself keeps the running sum; where there are too few blocks to keep the device busy,
splits are computed by different programs and summed by a second kernel. Both scale by powers of
two (`attention_parts` says why that is exact), so both round the same numbers in the same places.
What a row does not see adds zeros and multiplies by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.attention_parts import (
    add_keys,
    empty_state,
    merge,
    merge_states,
    partial_results,
    store_output,
    store_partial,
    workspace_elements,
)
from trunkline.kernels.triton.kv_pages import tile_keys
from trunkline.kernels.triton.launch import ALL_REGISTERS, ceil_div, device_traits
from trunkline.kernels.triton.paged_layer import PagedLayer
from trunkline.kernels.triton.prompt_attention import find_block

# Keys of a split: with another number a token's sums are rounded elsewhere.
SPLIT_SIZE = 512
PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class UnifiedConfig:
    """A block of query rows (tokens x heads of a group), a tile of keys, a program."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int  # 5 keep two tiles of keys in flight, 3 one
    max_registers: int | None = None  # see `ALL_REGISTERS`


CONFIGS = {  # by bytes of an element of queries and padded head dim
    (2, 16): UnifiedConfig(block_rows=64, block_keys=64, num_warps=4, num_stages=5),
    (2, 32): UnifiedConfig(block_rows=64, block_keys=64, num_warps=4, num_stages=5),
    (2, 64): UnifiedConfig(
        block_rows=64, block_keys=64, num_warps=4, num_stages=5, max_registers=ALL_REGISTERS
    ),
    (2, 128): UnifiedConfig(block_rows=64, block_keys=64, num_warps=8, num_stages=5),
    (2, 256): UnifiedConfig(block_rows=32, block_keys=32, num_warps=8, num_stages=5),
    (4, 16): UnifiedConfig(block_rows=16, block_keys=32, num_warps=4, num_stages=3),
    (4, 32): UnifiedConfig(block_rows=16, block_keys=32, num_warps=4, num_stages=3),
    (4, 64): UnifiedConfig(block_rows=16, block_keys=16, num_warps=4, num_stages=3),
    (4, 128): UnifiedConfig(block_rows=16, block_keys=16, num_warps=8, num_stages=3),
    (4, 256): UnifiedConfig(block_rows=16, block_keys=16, num_warps=8, num_stages=3),
}

# Numbers and addresses that differ between calls must not lead to another binary.
_VARYING = ["num_rows", "num_splits", "is_split", "score_scale", "value_scale"]
_UNALIGNED = [
    "page_tables",
    "row_slot",
    "kv_lens",
    "query_start",
    "partial_outputs",
    "partial_totals",
    "partial_exponents",
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def unified_kernel(
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
    query_start,
    num_rows,
    sinks,
    out,
    partial_outputs,
    partial_totals,
    partial_exponents,
    num_splits,
    is_split,
    score_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: a block of queries, heads of one kv head, and all splits or one of them."""
    HEADS: tl.constexpr = min(GROUP, BLOCK_M)
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // HEADS
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # The blocks with most keys are last in their rows: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    row, first_query = find_block(query_start, num_rows, block, BLOCK_TOKENS)
    first_token = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - first_token
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens + row)
    position = kv_len - query_len + first_query
    end = tl.minimum(position + BLOCK_TOKENS, kv_len)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(position - WINDOW + 1, 0)

    rows = tl.arange(0, BLOCK_M)
    tokens = rows // HEADS
    members = tl.program_id(1) % HEAD_BLOCKS * HEADS + rows % HEADS
    exists = (tokens < BLOCK_TOKENS) & (first_query + tokens < query_len) & (members < GROUP)
    heads = kv_head * GROUP + members
    flat = (first_token + first_query + tokens).to(tl.int64) * NUM_HEADS + heads
    dims = tl.arange(0, BLOCK_D)
    here = flat[:, None] * HEAD_DIM + dims[None, :]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + here, mask=inside, other=0.0)
    positions = position + tokens
    table = page_tables + tl.load(row_slot + row).to(tl.int64) * table_stride
    key_pool += kv_head * head_stride
    value_pool += kv_head * head_stride
    partial = (partial_outputs, partial_totals, partial_exponents)
    first_split, last_split = oldest // SPLIT, tl.cdiv(end, SPLIT)
    if is_split != 0:  # one that has no keys is written, too
        first_split, last_split = tl.program_id(2), tl.program_id(2) + 1
    whole = empty_state(BLOCK_M, BLOCK_D)
    for split in range(first_split, last_split):
        start = tl.maximum(split * SPLIT, oldest // BLOCK_N * BLOCK_N)
        stop = tl.minimum(split * SPLIT + SPLIT, end)
        state = empty_state(BLOCK_M, BLOCK_D)
        for first in range(start, stop, BLOCK_N):
            keys = first + tl.arange(0, BLOCK_N)
            stored = keys < end
            visible = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                stored = stored & (keys >= oldest)
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            state = add_keys(
                q, key_pool, value_pool, (page_stride, token_stride), table, keys, stored, visible,
                state, score_scale, HEAD_DIM, PAGE_SIZE, SOFT_CAP,
            )  # fmt: skip
        whole = merge_states(whole, state)
    if is_split != 0:
        store_partial(partial, flat * num_splits + first_split, exists, whole, HEAD_DIM)
    else:
        store_output(out, here, inside, sinks, heads, exists, whole, value_scale)


def unified_attention(
    query: torch.Tensor,
    layer: PagedLayer,
    row_slot: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    max_kv_len: int | None = None,
) -> None:
    """Attend causally from the last `query_start[r + 1] - query_start[r]` positions of each row r.

    Decode rows have one query. A token's result has the same bits whatever its batch and chunk,
    and whatever the size of the workspace. Tokens from `query_start[R]` on are padding: nothing is
    written for them.

    Args:
        query: [T, Hq, D], contiguous; rows one after another.
        layer: what is attended to.
        row_slot: [R] int32.
        kv_lens: [R] int32, the row's queries included.
        query_start: [R + 1] int32, ascending from 0; padding rows have no queries.
        out: [T, Hq, D], contiguous.
        workspace: float32, of any size above 0: with `unified_workspace_elements` few tokens with
            long contexts keep the whole device busy.
        max_kv_len: not below any of `kv_lens`; None for what the page tables can hold.

    Raises:
        ValueError: an argument is not as described.
    """
    num_tokens, num_heads, head_dim = query.shape
    layer.check(query.dtype, head_dim)
    constants = layer.constants(query)
    config = CONFIGS[query.element_size(), constants["BLOCK_D"]]
    num_rows = row_slot.shape[0]
    heads = min(constants["GROUP"], config.block_rows)
    num_blocks = num_tokens // (config.block_rows // heads) + num_rows
    head_blocks = layer.num_kv_heads * ceil_div(constants["GROUP"], heads)
    traits = device_traits(query.device)
    longest = max_kv_len or layer.page_tables.shape[1] * layer.page_size
    num_splits = ceil_div(longest, SPLIT_SIZE)
    few = 2 * num_blocks * head_blocks <= PROGRAMS_PER_PROCESSOR * traits.num_processors
    needed = workspace_elements(num_tokens, num_heads, head_dim, num_splits)
    is_split = few and num_splits > 1 and workspace.numel() >= needed
    partial = (workspace, workspace, workspace)
    if is_split:
        partial = partial_results(workspace, num_tokens, num_heads, head_dim, num_splits)
    unified_kernel[(num_blocks, head_blocks, num_splits if is_split else 1)](
        query,
        *layer.pages(traits),
        row_slot,
        kv_lens,
        query_start,
        num_rows,
        layer.sinks,
        out,
        *partial,
        num_splits,
        int(is_split),
        layer.score_scale,
        layer.value_scale,
        SPLIT=SPLIT_SIZE,
        BLOCK_M=config.block_rows,
        BLOCK_N=tile_keys(config.block_keys, layer.keys, traits),
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    if is_split:
        merge(partial, layer.sinks, query_start[-1:], out, num_splits, layer.value_scale)


def unified_workspace_elements(
    num_heads: int, num_kv_heads: int, head_dim: int, max_kv_len: int, num_processors: int
) -> int:
    """Size, in elements of float32, that serves every batch of decode rows that gains by splits."""
    num_rows = max(1, PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads // 2)
    num_splits = ceil_div(max_kv_len, SPLIT_SIZE)
    return workspace_elements(num_rows, num_heads, head_dim, num_splits)
