"""Paged causal attention of prompts, in chunks or whole, over everything in their pages.

A block holds the heads that share a kv head of some consecutive query tokens of one row. Tiles of
keys that every query of the block sees are taken without a mask; tiles outside of a sliding window
are not loaded. Where few queries meet many keys, the keys are split over programs, as in
`decode_attention`.
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
from trunkline.kernels.triton.kv_pages import tile_keys
from trunkline.kernels.triton.launch import ALL_REGISTERS, FP8, ceil_div, device_traits
from trunkline.kernels.triton.paged_layer import PagedLayer


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """A tile of keys and the program that takes it."""

    block_keys: int
    num_warps: int
    num_stages: int  # 5 keep two tiles of keys in flight, 3 one, 2 one without its page numbers
    max_registers: int | None = None  # see `ALL_REGISTERS`


CONFIGS = {  # by bytes of an element of queries, padded head dim and rows of a block
    (2, 16, 16): PromptConfig(block_keys=128, num_warps=4, num_stages=5),
    (2, 16, 64): PromptConfig(block_keys=64, num_warps=4, num_stages=5),
    (2, 16, 128): PromptConfig(block_keys=64, num_warps=8, num_stages=5),
    (2, 32, 16): PromptConfig(block_keys=128, num_warps=4, num_stages=5),
    (2, 32, 64): PromptConfig(block_keys=64, num_warps=4, num_stages=5),
    (2, 32, 128): PromptConfig(block_keys=64, num_warps=8, num_stages=5),
    (2, 64, 16): PromptConfig(block_keys=128, num_warps=4, num_stages=5),
    (2, 64, 64): PromptConfig(
        block_keys=64, num_warps=4, num_stages=5, max_registers=ALL_REGISTERS
    ),
    (2, 64, 128): PromptConfig(
        block_keys=64, num_warps=8, num_stages=5, max_registers=ALL_REGISTERS
    ),
    (2, 128, 16): PromptConfig(block_keys=64, num_warps=4, num_stages=5),
    (2, 128, 64): PromptConfig(block_keys=64, num_warps=4, num_stages=5),
    (2, 128, 128): PromptConfig(block_keys=64, num_warps=8, num_stages=5),
    (2, 256, 16): PromptConfig(block_keys=32, num_warps=4, num_stages=5),
    (2, 256, 64): PromptConfig(block_keys=64, num_warps=8, num_stages=3),
    (4, 16, 16): PromptConfig(block_keys=32, num_warps=4, num_stages=3),
    (4, 32, 16): PromptConfig(block_keys=32, num_warps=4, num_stages=3),
    # With 4 warps the assembler spills some registers for capability 10.0, whatever bound or stages
    # it is given.
    (4, 64, 16): PromptConfig(block_keys=32, num_warps=8, num_stages=3),
    (4, 128, 16): PromptConfig(block_keys=32, num_warps=4, num_stages=3),
    (4, 256, 16): PromptConfig(block_keys=16, num_warps=4, num_stages=2),
}
# Over a pool of fp8 tiles go through registers, where they are converted: half as many keys leave
# room for them beside a wide output.
FP8_CONFIGS = {**CONFIGS, (2, 256, 64): PromptConfig(block_keys=32, num_warps=8, num_stages=5)}


def choose_block_rows(rows: int, block_dim: int, element_bytes: int) -> int:
    """Rows of a block: as many as there are, up to what registers hold."""
    if element_bytes == 4:  # products without tensor cores: nothing is gained by large blocks
        return 16
    held = 64 if block_dim > 128 else 128
    return next(size for size in (16, 64, 128) if size >= min(rows, held))


def fitting_stages(config: PromptConfig, block_rows: int, row_bytes: int, shared: int) -> int:
    """Stages whose tiles of keys and values fit into shared memory beside the queries."""
    tiles = 2 * (config.num_stages // 2) * config.block_keys
    fits = (block_rows + tiles) * row_bytes <= shared * 0.95
    return config.num_stages if fits else min(config.num_stages, 3)


@triton.jit
def find_block(query_start, num_rows, block, BLOCK_TOKENS: tl.constexpr):
    """Row and first query (within the row) of a block.

    Row r has the blocks from `query_start[r] // BLOCK_TOKENS + r` on, which are enough wherever
    the row starts. So the number of blocks depends only on the numbers of tokens and rows.
    """
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start + middle) // BLOCK_TOKENS + middle
        low = tl.where(first <= block, middle, low)
        high = tl.where(first <= block, high, middle)
    first = tl.load(query_start + low) // BLOCK_TOKENS + low
    return low, (block - first) * BLOCK_TOKENS


@triton.jit
def _full_range(start, end, position, last, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of [start, end) that queries from `position` to `last` see whole."""
    full_end = tl.minimum(tl.maximum((position + 1) // BLOCK_N * BLOCK_N, start), end)
    full_start = start
    if WINDOW > 0:
        oldest = tl.maximum(last - WINDOW + 1, 0)
        full_start = tl.minimum(tl.maximum(tl.cdiv(oldest, BLOCK_N) * BLOCK_N, start), full_end)
    return full_start, full_end


@triton.jit
def _add_masked(
    query, key_pool, value_pool, strides, table, start, end, oldest, key_end, positions, state,
    score_scale, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the tiles of [start, end) that not every query sees whole."""
    for first in range(start, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        stored = keys < key_end
        visible = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            stored = stored & (keys >= oldest)
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        state = add_keys(
            query, key_pool, value_pool, strides, table, keys, stored, visible, state,
            score_scale, HEAD_DIM, PAGE_SIZE, SOFT_CAP,
        )  # fmt: skip
    return state


@triton.jit(
    do_not_specialize=["num_rows", "split_size", "max_splits", "score_scale", "value_scale"],
    # They begin behind the step's decode rows, whose number is any.
    do_not_specialize_on_alignment=["row_slot", "kv_lens"],
)
def prompt_kernel(
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
    """One program: a block of queries, heads of one kv head, one split."""
    HEADS: tl.constexpr = min(GROUP, BLOCK_M)
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // HEADS
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # The blocks with most keys are last in their rows: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    split = tl.program_id(2)
    row, first_query = find_block(query_start, num_rows, block, BLOCK_TOKENS)
    first_token = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - first_token
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens + row)
    position = kv_len - query_len + first_query
    last = tl.minimum(position + BLOCK_TOKENS, kv_len) - 1
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(position - WINDOW + 1, 0)
    start = oldest // BLOCK_N * BLOCK_N
    end = last + 1
    if IN_SPLITS:
        share = tl.cdiv(tl.cdiv(end - start, max_splits), BLOCK_N) * BLOCK_N
        share = tl.maximum(share, split_size)
        start = start + split * share
        end = tl.minimum(start + share, end)

    rows = tl.arange(0, BLOCK_M)
    tokens = rows // HEADS
    members = tl.program_id(1) % HEAD_BLOCKS * HEADS + rows % HEADS
    exists = (tokens < BLOCK_TOKENS) & (first_query + tokens < query_len) & (members < GROUP)
    heads = kv_head * GROUP + members
    flat = (first_token + first_query + tokens).to(tl.int64) * NUM_HEADS + heads
    partial = (partial_outputs, partial_totals, partial_exponents)
    if IN_SPLITS:
        if start >= end:
            store_nothing(partial, flat * max_splits + split, exists)
            return
    dims = tl.arange(0, BLOCK_D)
    here = flat[:, None] * HEAD_DIM + dims[None, :]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + here, mask=inside, other=0.0)
    positions = position + tokens
    table = page_tables + tl.load(row_slot + row).to(tl.int64) * table_stride
    key_pool += kv_head * head_stride
    value_pool += kv_head * head_stride
    strides = (page_stride, token_stride)
    state = empty_state(BLOCK_M, BLOCK_D)
    full_start, full_end = _full_range(start, end, position, last, WINDOW, BLOCK_N)
    if WINDOW > 0:
        state = _add_masked(
            q, key_pool, value_pool, strides, table, start, full_start, oldest, end, positions,
            state, score_scale, HEAD_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, BLOCK_N,
        )  # fmt: skip
    for first in range(full_start, full_end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        state = add_keys(
            q, key_pool, value_pool, strides, table, keys, None, None, state,
            score_scale, HEAD_DIM, PAGE_SIZE, SOFT_CAP,
        )  # fmt: skip
    state = _add_masked(
        q, key_pool, value_pool, strides, table, full_end, end, oldest, end, positions,
        state, score_scale, HEAD_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, BLOCK_N,
    )  # fmt: skip
    if IN_SPLITS:
        store_partial(partial, flat * max_splits + split, exists, state, HEAD_DIM)
    else:
        store_output(out, here, inside, sinks, heads, exists, state, value_scale)


def prompt_attention(
    query: torch.Tensor,
    layer: PagedLayer,
    row_slot: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    *,
    max_query_len: int,
    split_size: int = 256,
    max_splits: int = 1,
) -> None:
    """Attend causally from the last `query_start[r + 1] - query_start[r]` positions of each row r.

    Keys and values of the queries themselves are in the pools already. Tokens from
    `query_start[R]` on are padding: nothing is written for them.

    Args:
        query: [T, Hq, D], contiguous; rows one after another.
        layer: what is attended to.
        row_slot: [R] int32.
        kv_lens: [R] int32, the row's queries included.
        query_start: [R + 1] int32, ascending from 0; padding rows have no queries.
        out: [T, Hq, D], contiguous.
        workspace: flat float32, `workspace_elements(T, Hq, D, max_splits)`; unused for one split.
        max_query_len: not below any row's number of queries; the size of blocks depends on it.
        split_size: least number of keys in a split, a multiple of 128.
        max_splits: more than 1 where there are too few blocks to keep the device busy.

    Raises:
        ValueError: an argument is not as described.
    """
    num_tokens, num_heads, head_dim = query.shape
    layer.check(query.dtype, head_dim)
    check_split_size(split_size)
    constants = layer.constants(query)
    group, block_dim, size = constants["GROUP"], constants["BLOCK_D"], query.element_size()
    block_rows = choose_block_rows(max_query_len * group, block_dim, size)
    configs = FP8_CONFIGS if layer.keys.dtype == FP8 else CONFIGS
    config = configs[size, block_dim, block_rows]
    partial = None
    if max_splits > 1:
        partial = partial_results(workspace, num_tokens, num_heads, head_dim, max_splits)
    num_rows = row_slot.shape[0]
    heads = min(group, block_rows)
    num_blocks = num_tokens // (block_rows // heads) + num_rows
    traits = device_traits(query.device)
    block_keys = config.block_keys
    if block_rows * block_dim > 16 * 128:
        block_keys = tile_keys(block_keys, layer.keys, traits)
    prompt_kernel[(num_blocks, layer.num_kv_heads * ceil_div(group, heads), max_splits)](
        query,
        *layer.pages(traits),
        row_slot,
        kv_lens,
        query_start,
        num_rows,
        layer.sinks,
        out,
        *(partial or (None, None, None)),
        split_size,
        max_splits,
        layer.score_scale,
        layer.value_scale,
        IN_SPLITS=partial is not None,
        BLOCK_M=block_rows,
        BLOCK_N=block_keys,
        **constants,
        num_warps=config.num_warps,
        num_stages=fitting_stages(config, block_rows, block_dim * size, traits.shared_memory),
        maxnreg=config.max_registers,
    )
    if partial is not None:
        merge(partial, layer.sinks, query_start[-1:], out, max_splits, layer.value_scale)
