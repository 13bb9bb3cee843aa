"""What every attention kernel is told of a layer: pools, page tables, and how scores are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trunkline.kernels.triton.attention_parts import LOG2_E
from trunkline.kernels.triton.kv_pages import padded_head_dim, readable
from trunkline.kernels.triton.launch import FP8, DeviceTraits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayer:
    """Keys and values of one layer in pages, and what its queries do with them.

    Attributes:
        keys: [num_pages, page_size, Hkv, D]; the last dimension is contiguous; of queries' dtype,
            or fp8.
        values: like `keys`, with the same strides.
        page_tables: [slots, max_pages] int32; entries that no key lies in are not read.
        scale: of scores.
        window: how many keys a query sees, its own included; None for all.
        soft_cap: `cap * tanh(score / cap)` bounds scores; None for no bound.
        sinks: [Hq] logits that count in the denominator only, or None.
        key_scale: what keys of an fp8 pool are multiplied by.
        value_scale: what values of an fp8 pool are multiplied by.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_tables: torch.Tensor
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[2]

    @property
    def score_scale(self) -> float:
        """What products of queries and stored keys are multiplied by; see `scaled_scores`."""
        factor = LOG2_E.value if self.soft_cap is None else 1.0 / self.soft_cap
        return self.scale * self.key_scale * factor

    @property
    def strides(self) -> tuple[int, ...]:
        """Of both pools: of page, token and head."""
        return self.keys.stride()[:3]

    def check(self, dtype: torch.dtype, head_dim: int) -> None:
        """Refuse what the kernels would misread.

        Args:
            dtype: of queries.
            head_dim: of queries.

        Raises:
            ValueError: the pools differ in layout, have another dtype than queries and fp8, or have
                scales without being fp8; a head is too wide.
        """
        pools = [(pool.shape, pool.stride(), pool.dtype) for pool in (self.keys, self.values)]
        if pools[0] != pools[1] or self.keys.stride(-1) != 1:
            raise ValueError(
                f"key and value pool must have one layout with contiguous heads, got {pools}"
            )
        if dtype not in FLOATS:
            raise ValueError(f"queries are {dtype}, the Triton kernels take {FLOATS}")
        if self.keys.dtype not in (dtype, FP8):
            raise ValueError(
                f"the KV pool is {self.keys.dtype}, must be {FP8} or as queries: {dtype}"
            )
        scales = (self.key_scale, self.value_scale)
        if self.keys.dtype != FP8 and scales != (1.0, 1.0):
            raise ValueError(
                f"KV scales are {scales[0]} and {scales[1]}; a pool of {self.keys.dtype} takes 1.0"
            )
        padded_head_dim(head_dim)

    def pages(self, traits: DeviceTraits) -> tuple[torch.Tensor | int, ...]:
        """Arguments of a kernel: pools, their strides, page tables and the stride of those."""
        return (
            readable(self.keys, traits),
            readable(self.values, traits),
            *self.strides,
            self.page_tables,
            self.page_tables.stride(0),
        )

    def constants(self, query: torch.Tensor) -> dict[str, Any]:
        """Constants of a kernel that follow from the layer and from queries [T, Hq, D]."""
        _, num_heads, head_dim = query.shape
        return {
            "NUM_HEADS": num_heads,
            "GROUP": num_heads // self.num_kv_heads,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": self.page_size,
            "WINDOW": self.window or 0,
            "SOFT_CAP": self.soft_cap or 0.0,
            "BLOCK_D": padded_head_dim(head_dim),
        }
