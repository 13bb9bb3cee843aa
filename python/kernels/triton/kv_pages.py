"""Pools of KV pages as kernels see them: what they take, and loads through a page table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.fp8_bits import decode_e4m3
from trunkline.kernels.triton.launch import FP8, DeviceTraits, next_power_of_2

MAX_HEAD_DIM = 256
MIN_BLOCK_DIM = 16  # the least that a matrix product takes


def padded_head_dim(head_dim: int) -> int:
    """Width of the tiles that hold a head.

    Raises:
        ValueError: no tile is wide enough.
    """
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, the Triton kernels take at most {MAX_HEAD_DIM}")
    return max(next_power_of_2(head_dim), MIN_BLOCK_DIM)


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
        pool: of keys.
        traits: of the device.
    """
    if traits.capability >= 90:
        return block_keys
    return max(16, block_keys // (4 if readable(pool, traits).dtype == torch.uint8 else 2))


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
