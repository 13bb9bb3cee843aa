"""The soft cap of logits, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.launch import ceil_div

BLOCK = 2048
NUM_WARPS = 4


def cap_softly(logits: torch.Tensor, cap: float) -> None:
    """`logits = cap * tanh(logits / cap)`; NaN stays NaN.

    Args:
        logits: [n, width] float32, rows contiguous; overwritten.
        cap: above 0.
    """
    num_rows, width = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype}, strides {logits.stride()}: not float32 rows")
    if not cap > 0:
        raise ValueError(f"cap is {cap}, must be above 0")
    if num_rows == 0:
        return
    _cap_kernel[(num_rows, ceil_div(width, BLOCK))](
        logits, logits.stride(0), cap, 1.0 / cap, WIDTH=width, BLOCK=BLOCK, num_warps=NUM_WARPS
    )


@triton.jit
def _cap_kernel(logits_pointer, stride, cap, inverse_cap, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    pointers = logits_pointer + row * stride + columns
    x = tl.load(pointers, mask=inside, other=0.0) * inverse_cap
    decay = tl.exp(tl.abs(x) * -2.0)
    tangent = (1.0 - decay) / (1.0 + decay)
    tl.store(pointers, tl.where(x < 0, -tangent, tangent) * cap, mask=inside)
