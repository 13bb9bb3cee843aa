"""Which experts a token goes to, and the order in which experts see tokens.

A *pair* is one token at one of its experts; pair `token * top_k + choice`. Everything is decided
on the device: sizes follow from the number of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.launch import next_power_of_2

MAX_EXPERTS = 1024
PAIR_BLOCK = 2048  # pairs that one program looks at at once
FILL_BLOCK = 128


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Pairs sorted by expert, each expert's beginning at a multiple of `block_m`."""

    pairs: torch.Tensor  # [at most blocks * block_m] int32; num_pairs where there is none
    block_experts: torch.Tensor  # [blocks] int32; -1 for blocks that are not used
    num_pairs: int
    block_m: int


def route(
    router_logits: torch.Tensor, top_k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax in float32 over all experts, then the `top_k` largest, best first.

    Among equal ones the lower expert is taken. A token with NaN among its logits gets weights that
    are NaN and experts that exist.

    Args:
        router_logits: [T, E], any float dtype, rows contiguous.
        top_k: experts per token.
        renormalise: divide the weights by their sum.

    Returns:
        Experts [T, top_k] int32 and weights [T, top_k] float32.
    """
    num_tokens, num_experts = router_logits.shape
    if not 1 <= top_k <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"top_k {top_k} of {num_experts} experts is not supported: top_k must be at least 1 "
            f"and at most the number of experts, which must be at most {MAX_EXPERTS}"
        )
    if router_logits.stride(1) != 1:
        raise ValueError("the rows of router_logits must be contiguous")
    device = router_logits.device
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            router_logits,
            experts,
            weights,
            router_logits.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            BLOCK_EXPERTS=next_power_of_2(num_experts),
            BLOCK_K=next_power_of_2(top_k),
            RENORMALISE=renormalise,
            num_warps=1,
        )
    return experts, weights


def expert_order(experts: torch.Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    """Sort pairs by expert; within an expert they stay in order.

    Args:
        experts: [T, top_k] int32, contiguous.
        num_experts: how many there are.
        block_m: rows of one tile of the products.
    """
    num_pairs = experts.numel()
    device = experts.device
    # Each expert that has pairs leaves less than a block empty.
    num_blocks = (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.empty(num_blocks * block_m, dtype=torch.int32, device=device)
    block_experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    if num_pairs:
        _count_kernel[(num_experts,)](experts, counts, num_pairs, BLOCK=PAIR_BLOCK, num_warps=4)
        _place_kernel[(num_experts + 1,)](
            experts,
            counts,
            pairs,
            block_experts,
            num_pairs,
            num_blocks,
            NUM_EXPERTS=num_experts,
            BLOCK_EXPERTS=next_power_of_2(num_experts),
            BLOCK_M=block_m,
            BLOCK=PAIR_BLOCK,
            FILL_BLOCK=FILL_BLOCK,
            num_warps=4,
        )
    return ExpertOrder(pairs, block_experts, num_pairs, block_m)


@triton.jit
def _route_kernel(
    logits_pointer,
    experts_pointer,
    weights_pointer,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_EXPERTS)
    inside = experts < NUM_EXPERTS
    logits = tl.load(
        logits_pointer + token * logits_stride + experts, mask=inside, other=float("-inf")
    ).to(tl.float32)
    exponentials = tl.where(inside, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
    total = tl.sum(exponentials, axis=0)
    # Above -inf whatever they are, so that every choice is an expert that exists.
    keys = tl.where(logits >= -3.0e38, logits, -3.0e38)
    keys = tl.where(inside, keys, float("-inf"))
    choices = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for choice in range(TOP_K):
        best = tl.argmax(keys, axis=0)
        weight = tl.sum(tl.where(experts == best, exponentials, 0.0), axis=0) / total
        chosen = tl.where(choices == choice, best, chosen)
        weights = tl.where(choices == choice, weight, weights)
        keys = tl.where(experts == best, float("-inf"), keys)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(experts_pointer + token * TOP_K + choices, chosen, mask=choices < TOP_K)
    tl.store(weights_pointer + token * TOP_K + choices, weights, mask=choices < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(experts_pointer, counts_pointer, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        found = tl.load(experts_pointer + pairs, mask=pairs < num_pairs, other=-1)
        count += (found == expert).to(tl.int32)
    tl.store(counts_pointer + expert, tl.sum(count, axis=0))


@triton.jit
def _fill(pointer, start, end, value, FILL_BLOCK: tl.constexpr):
    for first in range(start, end, FILL_BLOCK):
        places = first + tl.arange(0, FILL_BLOCK)
        values = tl.zeros([FILL_BLOCK], tl.int32) + value
        tl.store(pointer + places, values, mask=places < end)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    experts_pointer,
    counts_pointer,
    pairs_pointer,
    block_experts_pointer,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL_BLOCK: tl.constexpr,
):
    """One program per expert, and one that marks what is left at the end."""
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_pointer + experts, mask=experts < NUM_EXPERTS, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    if expert == NUM_EXPERTS:
        _fill(block_experts_pointer, first_block, num_blocks, -1, FILL_BLOCK)
        _fill(pairs_pointer, first_block * BLOCK_M, num_blocks * BLOCK_M, num_pairs, FILL_BLOCK)
    else:
        end_block = first_block + tl.sum(tl.where(experts == expert, blocks, 0), axis=0)
        _fill(block_experts_pointer, first_block, end_block, expert, FILL_BLOCK)
        place = first_block * BLOCK_M
        for start in range(0, num_pairs, BLOCK):
            pairs = start + tl.arange(0, BLOCK)
            found = tl.load(experts_pointer + pairs, mask=pairs < num_pairs, other=-1)
            ours = (found == expert).to(tl.int32)
            ranks = tl.cumsum(ours, axis=0) - ours
            tl.store(pairs_pointer + place + ranks, pairs, mask=ours != 0)
            place += tl.sum(ours, axis=0)
        _fill(pairs_pointer, place, end_block * BLOCK_M, num_pairs, FILL_BLOCK)
