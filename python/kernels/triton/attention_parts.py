"""What the attention kernels share: one tile of keys, partial results, and their sum.

Scores are in units of log2. The running maximum is rounded up to a whole number, so scaling a sum
to another maximum multiplies by a power of two, which is exact: sums are rounded the same whenever
they are scaled.

    scores s = q K^T * scale                        hidden keys: -inf
    e = max(e', ceil(max(s)))                       whole; LOWEST when no key was visible
    p = 2^(s - e);  l = l' 2^(e' - e) + sum(p);  o = o' 2^(e' - e) + p V
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.kv_pages import key_offsets, load_tile
from trunkline.kernels.triton.launch import dot, narrow, next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)
# Below every score; the difference of two of them is 0, that of two -inf would be NaN.
LOWEST = tl.constexpr(-1.0e30)
# Splits that the merge takes at once: their loads do not wait for each other, nor for the sums of
# those before.
MERGE_UNROLL = tl.constexpr(8)


@triton.jit
def power_of_two(exponent):
    """2^exponent of whole numbers up to 0, from its bits; 0 below 2^-126."""
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_scores(products, score_scale, SOFT_CAP: tl.constexpr):
    """Scores in units of log2; see `PagedLayer.score_scale`."""
    scores = products * score_scale
    if SOFT_CAP > 0:
        decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        tangent = (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -tangent, tangent) * (SOFT_CAP * LOG2_E)
    return scores


@triton.jit
def add_tile(query, keys, values, visible, state, score_scale, SOFT_CAP: tl.constexpr):
    """Take one tile of keys and values into `state` = running (output, total, highest).

    `visible`: [rows, keys] mask, or None if every row sees every key.
    """
    output, total, highest = state
    products = dot(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32))
    scores = scaled_scores(products, score_scale, SOFT_CAP)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    raised = tl.maximum(highest, tl.ceil(tl.max(scores, axis=1)))
    weights = tl.exp2(scores - raised[:, None])
    shrink = power_of_two(highest - raised)
    total = total * shrink + tl.sum(weights, axis=1)
    output = dot(narrow(weights, query.dtype), values, output * shrink[:, None])
    return output, total, raised


@triton.jit
def add_keys(
    query,
    key_pool,
    value_pool,
    strides,
    table,
    keys,
    stored,
    visible,
    state,
    score_scale,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Load the tile of some consecutive positions and add it; see `add_tile`.

    `strides`: of page and token; `stored`: [keys] mask of what may be read, or None for all.
    """
    dims = tl.arange(0, query.shape[1])
    offsets = key_offsets(table, keys, stored, strides[0], strides[1], PAGE_SIZE)
    k = load_tile(key_pool, offsets, stored, dims, HEAD_DIM, query.dtype)
    v = load_tile(value_pool, offsets, stored, dims, HEAD_DIM, query.dtype)
    return add_tile(query, k, v, visible, state, score_scale, SOFT_CAP)


@triton.jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Output, total and highest of rows that have seen nothing."""
    return (
        tl.zeros([ROWS, DIM], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], LOWEST, tl.float32),
    )


@triton.jit
def add_sink(state, sink):
    """Count a logit that has no value in the denominator; `sink` in units of log2."""
    output, total, highest = state
    raised = tl.maximum(highest, tl.ceil(sink))
    shrink = power_of_two(highest - raised)
    return output * shrink[:, None], total * shrink + tl.exp2(sink - raised), raised


@triton.jit
def merge_states(whole, part):
    """Add the state of later keys to that of earlier ones."""
    output, total, highest = whole
    raised = tl.maximum(highest, part[2])
    shrink, grow = power_of_two(highest - raised), power_of_two(part[2] - raised)
    output = output * shrink[:, None] + part[0] * grow[:, None]
    return output, total * shrink + part[1] * grow, raised


@triton.jit
def store_output(out, here, mask, sinks, heads, exists, state, value_scale):
    """Write the weighted means of rows; 0 for rows that saw nothing.

    `here`, `mask`: [rows, dims] offsets and which exist; `heads`, `exists`: of the rows.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=exists, other=0.0).to(tl.float32) * LOG2_E
        state = add_sink(state, sink)
    output, total, _ = state
    divisor = tl.where(total == 0.0, 1.0, total)
    output = output / divisor[:, None] * value_scale
    tl.store(out + here, narrow(output, out.dtype.element_ty), mask=mask)


@triton.jit
def store_partial(partial, places, mask, state, HEAD_DIM: tl.constexpr):
    """Keep the state of rows; `places`: [rows] int64 number of the (token, head, split)."""
    outputs, totals, exponents = partial
    output, total, highest = state
    dims = tl.arange(0, output.shape[1])
    tl.store(totals + places, total, mask=mask)
    tl.store(exponents + places, highest, mask=mask)
    # Rows that saw nothing have no output: the sum skips them by their total.
    kept = (mask & (total != 0.0))[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(outputs + places[:, None] * HEAD_DIM + dims[None, :], output, mask=kept)


@triton.jit
def store_nothing(partial, places, mask):
    """Keep that rows saw nothing."""
    _, totals, _ = partial
    tl.store(totals + places, tl.zeros([places.shape[0]], tl.float32), mask=mask)


@triton.jit(do_not_specialize=["num_splits", "value_scale"])
def merge_kernel(
    partial_outputs,
    partial_totals,
    partial_exponents,
    sinks,
    token_end,
    out,
    num_splits,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Sum the splits of one token and head, in ascending order whatever their number.

    `token_end`: pointer to the number of tokens that have partial results, or None if all have.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token_end is not None:
        if token >= tl.load(token_end):
            return
    first = (token * NUM_HEADS + head) * num_splits
    splits = tl.arange(0, BLOCK_SPLITS)
    totals = tl.load(partial_totals + first + splits, mask=splits < num_splits, other=0.0)
    end = tl.max(tl.where(totals != 0.0, splits + 1, 0), axis=0)
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < HEAD_DIM
    output = tl.zeros([BLOCK_DIM], tl.float32)
    total = 0.0
    highest = LOWEST
    for start in range(0, end, MERGE_UNROLL):
        for step in tl.static_range(MERGE_UNROLL):
            split = start + step
            part = tl.load(partial_totals + first + split, mask=split < end, other=0.0)
            exponent = tl.load(partial_exponents + first + split, mask=split < end, other=LOWEST)
            exponent = tl.where(part != 0.0, exponent, LOWEST)
            pointers = partial_outputs + (first + split) * HEAD_DIM + dims
            width = tl.where(part != 0.0, HEAD_DIM, 0)
            tile = tl.load(pointers, mask=dims < width, other=0.0)
            raised = tl.maximum(highest, exponent)
            shrink, grow = power_of_two(highest - raised), power_of_two(exponent - raised)
            output = output * shrink + tile * grow
            total = total * shrink + part * grow
            highest = raised
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        raised = tl.maximum(highest, tl.ceil(sink))
        output *= power_of_two(highest - raised)
        total = total * power_of_two(highest - raised) + tl.exp2(sink - raised)
    output = output / tl.where(total == 0.0, 1.0, total) * value_scale
    pointers = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(pointers, narrow(output, out.dtype.element_ty), mask=inside)


def check_split_size(split_size: int) -> None:
    """Refuse a size of splits that is no multiple of every tile of keys.

    Raises:
        ValueError: it is none.
    """
    if split_size % 128 != 0 or split_size <= 0:
        raise ValueError(f"split_size is {split_size}, must be a positive multiple of 128")


def workspace_elements(num_tokens: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Size, in elements of float32, of a workspace for partial results."""
    return num_tokens * num_heads * num_splits * (head_dim + 2)


def partial_results(
    workspace: torch.Tensor | None,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, totals and exponents in a workspace, by (token, head, split).

    Raises:
        ValueError: the workspace is too small or no flat float32.
    """
    needed = workspace_elements(num_tokens, num_heads, head_dim, num_splits)
    if workspace is None or workspace.dtype != torch.float32 or workspace.numel() < needed:
        found = None if workspace is None else (workspace.dtype, workspace.numel())
        raise ValueError(
            f"workspace is {found}; {num_tokens} tokens with {num_heads} heads of {head_dim} in "
            f"{num_splits} splits need float32 of {needed} elements"
        )
    workspace = workspace.view(-1)
    count = num_tokens * num_heads * num_splits
    outputs = workspace[: count * head_dim]
    totals, exponents = workspace[count * head_dim : needed].view(2, count)
    return outputs, totals, exponents


def merge(
    partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None,
    token_end: torch.Tensor | None,
    out: torch.Tensor,
    num_splits: int,
    value_scale: float,
) -> None:
    """Sum partial results into `out` [tokens, heads, head_dim].

    Args:
        partial: of `partial_results`; every total of a token below `token_end` is written.
        sinks: [heads], or None.
        token_end: [1] int32 number of tokens to write, or None for all of `out`.
        out: contiguous.
        num_splits: of `partial_results`.
        value_scale: what values are multiplied by.
    """
    num_tokens, num_heads, head_dim = out.shape
    block_dim = next_power_of_2(head_dim)
    merge_kernel[(num_tokens, num_heads)](
        *partial,
        sinks,
        token_end,
        out,
        num_splits,
        value_scale,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_SPLITS=next_power_of_2(num_splits),
        num_warps=max(1, min(4, block_dim // 64)),
    )
