"""Norm of queries and keys, rotary encoding in halves, and the write of keys and values to pages.

One launch per layer. The first `rotary_dim` elements of a head are turned in pairs `(i, i +
rotary_dim / 2)`; those behind stay. All arithmetic is in float32, rounded once at the store.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.fp8_bits import encode_e4m3
from trunkline.kernels.triton.kv_pages import as_bits, padded_head_dim
from trunkline.kernels.triton.launch import ceil_div, narrow, next_power_of_2
from trunkline.kernels.triton.paged_layer import PagedLayer


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """What one program turns."""

    block_heads: int
    num_warps: int


CONFIGS = {  # by the size of a head, padded: about 8 elements per thread
    16: RotaryConfig(block_heads=8, num_warps=1),
    32: RotaryConfig(block_heads=8, num_warps=1),
    64: RotaryConfig(block_heads=8, num_warps=2),
    128: RotaryConfig(block_heads=8, num_warps=4),
    256: RotaryConfig(block_heads=8, num_warps=8),
}


@triton.jit
def _store(pointers, x, mask):
    if pointers.dtype.element_ty == tl.uint8:
        tl.store(pointers, encode_e4m3(x), mask=mask)
    else:
        tl.store(pointers, narrow(x, pointers.dtype.element_ty), mask=mask)


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _turn_heads(
    source,
    target,
    target_stride,
    weight,
    turn,
    epsilon,
    inverse_scale,
    heads,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Norm (where there is a weight) and turn heads; `HALF` elements pair up with as many others.

    `turn`: HALF cosines, then as many sines.
    """
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    exists = (heads < num_heads)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    in_half = half < HALF
    in_rest = rest < HEAD_DIM
    source += heads[:, None] * HEAD_DIM
    target += heads[:, None] * target_stride
    first = _load(source + half, exists & in_half)
    second = _load(source + half + HALF, exists & in_half)
    if REST > 0:
        tail = _load(source + rest, exists & in_rest)
    if weight is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            squares += tl.sum(tail * tail, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        first *= inverse * _load(weight + half, in_half)
        second *= inverse * _load(weight + half + HALF, in_half)
        if REST > 0:
            tail *= inverse * _load(weight + rest, in_rest)
    if HALF > 0:
        cosines = _load(turn + half, in_half)
        sines = _load(turn + half + HALF, in_half)
        turned = (first * cosines - second * sines) * inverse_scale
        second = (second * cosines + first * sines) * inverse_scale
        _store(target + half, turned, exists & in_half)
        _store(target + half + HALF, second, exists & in_half)
    if REST > 0:
        _store(target + rest, tail * inverse_scale, exists & in_rest)


@triton.jit(do_not_specialize=["epsilon", "inverse_key_scale", "inverse_value_scale"])
def rotate_and_write_kernel(
    qkv,
    turns,
    query_weight,
    key_weight,
    epsilon,
    key_pool,
    value_pool,
    page_stride,
    token_stride,
    head_stride,
    page_tables,
    table_stride,
    token_slot,
    positions,
    inverse_key_scale,
    inverse_value_scale,
    query_out,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One program: a block of query heads, of key heads or of value heads of one token."""
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KEY_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(token_slot + token).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions + token).to(tl.int64)
    page = tl.load(page_tables + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
    written = page * page_stride + (position % PAGE_SIZE) * token_stride
    qkv += token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    turn = turns + position * (2 * HALF)
    if block < QUERY_BLOCKS:
        heads = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        query = query_out + token * NUM_HEADS * HEAD_DIM
        _turn_heads(
            qkv, query, HEAD_DIM, query_weight, turn, epsilon, 1.0, heads, NUM_HEADS,
            HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif block < QUERY_BLOCKS + KEY_BLOCKS:
        heads = (block - QUERY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        keys = qkv + NUM_HEADS * HEAD_DIM
        _turn_heads(
            keys, key_pool + written, head_stride, key_weight, turn, epsilon, inverse_key_scale,
            heads, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        heads = (block - QUERY_BLOCKS - KEY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        values = qkv + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)
        x = _load(values + heads[:, None] * HEAD_DIM + dims, mask) * inverse_value_scale
        _store(value_pool + written + heads[:, None] * head_stride + dims, x, mask)


def rotate_and_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    query_norm_weight: torch.Tensor | None,
    key_norm_weight: torch.Tensor | None,
    epsilon: float,
    layer: PagedLayer,
    token_slot: torch.Tensor,
    positions: torch.Tensor,
    query_out: torch.Tensor,
) -> None:
    """Turn queries and keys of T tokens; write keys and values to the layer's pages.

    Nothing is written for a padding token. A pool in fp8 keeps `key / key_scale` and `value /
    value_scale`, saturated at 448; other pools take scales of 1.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], contiguous.
        cos_sin: [P, rotary_dim] float32, contiguous: cosines, then sines; P above every position.
            A `rotary_dim` of 0 turns nothing.
        query_norm_weight: [D], or None for no norm of the queries.
        key_norm_weight: [D], or None for no norm of the keys.
        epsilon: of both norms.
        layer: where keys and values go.
        token_slot: [T] int32; -1 for padding.
        positions: [T] int32.
        query_out: [T, Hq, D], contiguous.

    Raises:
        ValueError: a head has more than 256 elements, a pool that is not fp8 has a scale, or the
            pools' layouts differ.
    """
    num_tokens, num_heads, head_dim = query_out.shape
    num_kv_heads = layer.num_kv_heads
    layer.check(qkv.dtype, head_dim)
    block_dim = padded_head_dim(head_dim)
    config = CONFIGS[block_dim]
    half = cos_sin.shape[1] // 2
    key_blocks = ceil_div(num_kv_heads, config.block_heads)
    rotate_and_write_kernel[(num_tokens, ceil_div(num_heads, config.block_heads) + 2 * key_blocks)](
        qkv,
        cos_sin,
        query_norm_weight,
        key_norm_weight,
        epsilon,
        as_bits(layer.keys),
        as_bits(layer.values),
        *layer.strides,
        layer.page_tables,
        layer.page_tables.stride(0),
        token_slot,
        positions,
        1.0 / layer.key_scale,
        1.0 / layer.value_scale,
        query_out,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=layer.page_size,
        HALF=half,
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(head_dim - 2 * half),
        BLOCK_DIM=block_dim,
        BLOCK_HEADS=config.block_heads,
        num_warps=config.num_warps,
    )
