"""Pools of KV pages as kernels see them: what they take, and loads through a page table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.fp8_bits import decode_e4m3
from trunkline.kernels.triton.launch import FP8, DeviceTraits, next_power_of_2

MAX_HEAD_DIM = 256
MIN_BLOCK_DIM = 16  # the least that a matrix product takes
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def padded_head_dim(head_dim: int) -> int:
    """Width of the tiles that hold a head.

    Raises:
        ValueError: no tile is wide enough.
    """
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, the Triton kernels take at most {MAX_HEAD_DIM}")
    return max(next_power_of_2(head_dim), MIN_BLOCK_DIM)


def check_pools(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    key_scale: float,
    value_scale: float,
    dtype: torch.dtype,
) -> None:
    """Refuse pools that the kernels would misread.

    Args:
        key_pool: [num_pages, page_size, Hkv, D].
        value_pool: like it.
        key_scale: of keys.
        value_scale: of values.
        dtype: of queries.

    Raises:
        ValueError: the pools differ in layout, have another dtype than queries and fp8, or have
            scales without being fp8.
    """
    layouts = [(pool.shape, pool.stride(), pool.dtype) for pool in (key_pool, value_pool)]
    if layouts[0] != layouts[1] or key_pool.stride(-1) != 1:
        raise ValueError(
            f"key and value pool must have one layout with contiguous heads, got {layouts}"
        )
    if dtype not in FLOATS:
        raise ValueError(f"queries are {dtype}, the Triton kernels take {FLOATS}")
    if key_pool.dtype not in (dtype, FP8):
        raise ValueError(f"the KV pool is {key_pool.dtype}, must be {FP8} or as queries: {dtype}")
    if key_pool.dtype != FP8 and (key_scale, value_scale) != (1.0, 1.0):
        raise ValueError(
            f"KV scales are {key_scale} and {value_scale}; a pool of {key_pool.dtype} takes 1.0"
        )


def as_bits(pool: torch.Tensor) -> torch.Tensor:
    """The pool as kernels write it: fp8 as bytes."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def readable(pool: torch.Tensor, traits: DeviceTraits) -> torch.Tensor:
    """The pool as kernels read it: fp8 as bytes where the device cannot convert it."""
    return pool if traits.capability >= 89 else as_bits(pool)


def tile_keys(block_keys: int, pool: torch.Tensor, traits: DeviceTraits) -> int:
    """Keys of a tile of prompts: what registers hold where products take their operands from them.

    Args:
        block_keys: what the configuration says.
        pool: of `readable`.
        traits: of the device.
    """
    if traits.capability >= 90:
        return block_keys
    return max(16, block_keys // (4 if pool.dtype == torch.uint8 else 2))


@triton.jit
def key_offsets(table, keys, mask, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """Offsets (int64) of positions in a pool, through one row of a page table.

    `mask`: which positions exist, or None if all do; the others get those of page 0.
    """
    keys = keys.to(tl.uint32)  # what divides them need not care for negative ones
    if mask is None:
        pages = tl.load(table + keys // PAGE_SIZE)
    else:
        pages = tl.load(table + keys // PAGE_SIZE, mask=mask, other=0)
    return pages.to(tl.int64) * page_stride + (keys % PAGE_SIZE).to(tl.int64) * token_stride


@triton.jit
def load_tile(pool, offsets, mask, dims, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """[keys, padded head] operands of products; zeros where `mask` (or None) hides a key."""
    pointers = pool + offsets[:, None] + dims[None, :]
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    if mask is None:
        if PADDED:
            inside = (dims < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=inside, other=0.0)
        else:
            tile = tl.load(pointers)
    else:
        exists = mask[:, None]
        if PADDED:
            exists = exists & (dims < HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=exists, other=0.0)
    if tile.dtype == tl.uint8:
        return decode_e4m3(tile).to(DTYPE)
    return tile.to(DTYPE)
