"""Copies of the leading tokens of pages, in all layers by one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.kv_pages import as_bits
from trunkline.kernels.triton.launch import ceil_div, next_power_of_2

MAX_BLOCK = 4096  # elements
NUM_WARPS = 4


@triton.jit
def copy_kernel(
    pool, moves, plane_stride, page_stride, TOKEN_ELEMENTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: a block of one page of one plane."""
    move = moves + tl.program_id(0) * 3
    source = tl.load(move).to(tl.int64)
    destination = tl.load(move + 1).to(tl.int64)
    count = tl.load(move + 2) * TOKEN_ELEMENTS
    elements = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    plane = pool + tl.program_id(1).to(tl.int64) * plane_stride
    copied = elements < count
    x = tl.load(plane + source * page_stride + elements, mask=copied)
    tl.store(plane + destination * page_stride + elements, x, mask=copied)


def copy_pages(pools: torch.Tensor, moves: torch.Tensor) -> None:
    """Copy the leading tokens of pages.

    Args:
        pools: [..., num_pages, page_size, Hkv, D], contiguous; every leading index (layers, keys
            and values) is a plane of pages.
        moves: [M, 3] int32, contiguous: source page, destination page, tokens; (0, 0, 0) does
            nothing. No page is source and destination, or twice destination.

    Raises:
        ValueError: the pools are not contiguous.
    """
    if not pools.is_contiguous():
        raise ValueError(f"pools have strides {pools.stride()}, must be contiguous")
    num_pages, page_size, num_kv_heads, head_dim = pools.shape[-4:]
    page_elements = page_size * num_kv_heads * head_dim
    planes = as_bits(pools).view(-1, num_pages, page_elements)
    block = min(MAX_BLOCK, next_power_of_2(page_elements))
    if moves.shape[0] == 0:
        return
    copy_kernel[(moves.shape[0], planes.shape[0], ceil_div(page_elements, block))](
        planes,
        moves,
        planes.stride(0),
        planes.stride(1),
        TOKEN_ELEMENTS=num_kv_heads * head_dim,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
