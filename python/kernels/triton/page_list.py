"""The pages of a step's rows one after another, as FlashInfer reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.launch import ceil_div

PAGES_PER_PROGRAM = 512


def list_pages(
    page_tables: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, pages: torch.Tensor
) -> None:
    """Write the leading pages of some slots one after another.

    Args:
        page_tables: [slots, max_pages] int32.
        slots: [rows] int32.
        starts: [rows + 1] int32: row r's pages go to `starts[r]..starts[r + 1]`.
        pages: [starts[-1]] int32, written.
    """
    grid = (slots.shape[0], ceil_div(page_tables.shape[1], PAGES_PER_PROGRAM))
    _list_pages_kernel[grid](
        page_tables, page_tables.stride(0), slots, starts, pages, BLOCK=PAGES_PER_PROGRAM
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])  # of prompts: behind any number of others
def _list_pages_kernel(page_tables, table_stride, slots, starts, pages, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1).to(tl.int64) - start
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table = page_tables + tl.load(slots + row).to(tl.int64) * table_stride
    page = tl.load(table + index, mask=index < count, other=0)
    tl.store(pages + start + index, page, mask=index < count)
