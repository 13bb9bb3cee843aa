"""Paged causal attention with the same bits for a query in any batch, chunk or step.

Keys are processed in blocks of `BLOCK` tokens at fixed absolute positions. Within a block every
query row is computed by products of fixed shape (proven, as for linears). Blocks are then summed
in ascending order in float32. The block maximum is rounded up to a whole power of two, so scaling
a partial sum to another maximum is exact: summing as one goes (long prompts) and summing against
the overall maximum (decoding, many blocks at once) give equal bits.

    scores s = q K^T          [rows, BLOCK]      hidden keys: -inf
    e = ceil(max(s) / ln 2)   [rows]             block exponent, a whole number
    p = exp(s - e ln 2), l = sum(p), o = p V
    total = sum over blocks of 2^(e - e_max) * (o, l);  result = o / l

A soft cap changes s before anything is hidden. A sink is a block of its own, the last, with
s = its score and o = 0.

A hidden key has p = 0 exactly and a wholly hidden block has weight 0 exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trunkline.kernels.specs import AttentionSpec
from trunkline.kernels.tensor_weights import SinksWeight
from trunkline.kernels.torch_reference.attention_plan import (
    BLOCK,
    ROW_MULTIPLE,
    AttentionPlan,
    Chunk,
    Group,
    HeadShape,
)
from trunkline.kernels.torch_reference.kv_pool import TorchKvPool
from trunkline.kernels.torch_reference.tiling import random_tensor

TILE_TOKENS = (1, 8, 32, BLOCK)
LN2 = math.log(2.0)
LOWEST_EXPONENT = -100_000.0

BatchedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def product_one_by_one(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`torch.bmm` without batching, for devices where batching changes bits."""
    pairs = zip(torch.split(left, 1), torch.split(right, 1), strict=True)
    return torch.cat([torch.bmm(a, b) for a, b in pairs])


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Head sizes with the tiles and the product that are batch-invariant on this device."""

    heads: HeadShape
    product: BatchedProduct

    @staticmethod
    def measure(
        num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> AttentionKernel:
        """Find out which tile heights and which product keep every row's bits."""
        like = torch.empty(0, dtype=torch.float32, device=device)
        every = HeadShape(num_heads, num_kv_heads, head_dim, TILE_TOKENS)
        proven = tuple(t for t in TILE_TOKENS if _is_invariant(every, t, like))
        if BLOCK not in proven:
            single = HeadShape(num_heads, num_kv_heads, head_dim, (1,))
            return AttentionKernel(single, product_one_by_one)
        return AttentionKernel(HeadShape(num_heads, num_kv_heads, head_dim, proven), torch.bmm)

    def attend(
        self, query: torch.Tensor, plan: AttentionPlan, pool: TorchKvPool, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend over the pool, which already holds the step's own keys and values.

        Args:
            query: [tokens, heads, head_dim] float32, turned and scaled.
            plan: the step's tiles.
            pool: where keys and values are.
            spec: the layer's attention.

        Returns:
            [tokens, heads * head_dim] in the pool's dtype.
        """
        heads = self.heads
        width = heads.num_heads * heads.head_dim
        result = torch.empty((query.shape[0], width), dtype=pool.data.dtype, device=query.device)
        shared = heads.num_heads // heads.num_kv_heads
        for group in plan.groups:
            rows = self._query_rows(query, group)
            output = self._attend_group(rows, group, pool, spec)[:, :, : shared * group.tile_tokens]
            shape = (heads.num_kv_heads, -1, shared, group.tile_tokens, heads.head_dim)
            flat = output.reshape(shape).permute(1, 3, 0, 2, 4).reshape(-1, width)
            result[group.kept_tokens] = flat.index_select(0, group.kept).to(result.dtype)
        return result

    def _query_rows(self, query: torch.Tensor, group: Group) -> torch.Tensor:
        heads = self.heads
        shape = (group.num_tiles, group.tile_tokens, heads.num_kv_heads, -1, heads.head_dim)
        tiles = query.index_select(0, group.token_index).view(shape).permute(2, 0, 3, 1, 4)
        rows = tiles.reshape(heads.num_kv_heads, group.num_tiles, -1, heads.head_dim)
        return F.pad(rows, (0, 0, 0, group.num_rows - rows.shape[2]))

    def _attend_group(
        self, rows: torch.Tensor, group: Group, pool: TorchKvPool, spec: AttentionSpec
    ) -> torch.Tensor:
        exponents = sums = outputs = torch.empty(0)
        for index, chunk in enumerate(group.chunks):
            active = slice(0, chunk.num_tiles)
            exponent, total, output = self._attend_chunk(rows[:, active], chunk, pool, spec)
            highest = exponent.amax(2)
            if index == 0:  # has every tile
                exponents = highest
                outputs = torch.zeros_like(output[:, :, 0])  # [kv_heads, tiles, rows, head_dim]
                sums = torch.zeros_like(total[:, :, 0])
            else:
                highest = torch.maximum(exponents[:, active], highest)
                rescale = power_of_two(exponents[:, active] - highest)
                outputs[:, active] *= rescale
                sums[:, active] *= rescale
                exponents[:, active] = highest
            if chunk.num_blocks > 1 or index > 0:
                weight = power_of_two(exponent - highest.unsqueeze(2))
                output *= weight
                total *= weight
            for block in range(chunk.num_blocks):
                outputs[:, active] += output[:, :, block]
                sums[:, active] += total[:, :, block]
        if spec.sinks is not None:
            assert isinstance(spec.sinks, SinksWeight)
            sinks = self._sink_rows(spec.sinks.scores, group)
            sink_exponents = _block_exponent(sinks)
            highest = torch.maximum(exponents, sink_exponents)
            rescale = power_of_two(exponents - highest)
            outputs *= rescale
            weights = sinks.sub_(sink_exponents * LN2).exp_()
            sums = sums * rescale + weights * power_of_two(sink_exponents - highest)
        return outputs / sums

    def _sink_rows(self, scores: torch.Tensor, group: Group) -> torch.Tensor:
        rows = scores.view(self.heads.num_kv_heads, -1).repeat_interleave(group.tile_tokens, 1)
        return F.pad(rows, (0, group.num_rows - rows.shape[1]))[:, None, :, None]

    def _attend_chunk(
        self, rows: torch.Tensor, chunk: Chunk, pool: TorchKvPool, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_heads, num_tiles, num_rows, head_dim = rows.shape
        shape = (num_heads, num_tiles, chunk.num_blocks, num_rows)
        flat = (-1, BLOCK, head_dim)
        keys = pool.keys[spec.layer].index_select(1, chunk.pages).view(flat).float()
        values = pool.values[spec.layer].index_select(1, chunk.pages)
        values = values.view(num_heads, -1, head_dim).float()
        if chunk.stale is not None:
            # Hidden keys have weight 0, but 0 times a leftover infinity would be NaN.
            values.index_fill_(1, chunk.stale, 0.0)
        queries = rows.unsqueeze(2).expand(*shape, head_dim).reshape(-1, num_rows, head_dim)
        scores = self.product(queries, keys.transpose(1, 2)).view(*shape, BLOCK)
        if spec.soft_cap is not None:
            cap_softly(scores, spec.soft_cap)
        if chunk.mask is not None:
            scores[:, chunk.masked_from :].masked_fill_(chunk.mask, -torch.inf)
        exponent = _block_exponent(scores.amax(-1, keepdim=True))
        weights = scores.sub_(exponent * LN2).exp_()
        total = weights.sum(-1, keepdim=True)
        output = self.product(weights.view(-1, num_rows, BLOCK), values.view(flat))
        return exponent, total, output.view(*shape, head_dim)


def _block_exponent(maximum: torch.Tensor) -> torch.Tensor:
    return (maximum * (1.0 / LN2)).ceil_().clamp_(LOWEST_EXPONENT)


def cap_softly(scores: torch.Tensor, soft_cap: float) -> None:
    """`cap * tanh(score / cap)` in place, by exp: its bits do not depend on an element's place."""
    scores.mul_(2.0 / soft_cap).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0).mul_(soft_cap)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """`2 ** exponent` exactly, for whole exponents <= 0; below -126 it is 0."""
    return exponent.clamp(min=-127.0).add_(127.0).to(torch.int32).mul_(1 << 23).view(torch.float32)


def _is_invariant(heads: HeadShape, tile_tokens: int, like: torch.Tensor) -> bool:
    """Whether a tile's rows have the bits that they have, elsewhere, in a tile of BLOCK tokens."""
    num_rows = heads.num_rows(tile_tokens)
    tallest = heads.num_rows(BLOCK)
    assert num_rows % ROW_MULTIPLE == 0
    for inner, outer in ((heads.head_dim, BLOCK), (BLOCK, heads.head_dim)):
        left = random_tensor((tallest, inner), like, seed=4)
        right = random_tensor((7, inner, outer), like, seed=5)
        if inner == heads.head_dim:
            right = right.transpose(1, 2).contiguous().transpose(1, 2)
        expected = torch.cat([torch.bmm(left[None], right[i : i + 1]) for i in range(7)])
        for count, step in ((1, 1), (2, 5), (3, 7), (7, 11)):
            chosen = (torch.arange(num_rows, device=like.device) * step + count) % tallest
            rows = left[chosen].expand(count, -1, -1).contiguous()
            if not torch.equal(torch.bmm(rows, right[:count]), expected[:count, chosen]):
                return False
    return True
