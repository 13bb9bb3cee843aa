"""What the operations of one forward pass share: the step's tokens and rows on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trunkline.kernels.interface import IntArray
from trunkline.kernels.specs import AttentionSpec
from trunkline.kernels.tensor_weights import SinksWeight
from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.paged_layer import PagedLayer
from trunkline.kernels.triton.pool import DeviceKvPool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """One step. The first `num_decode_rows` rows have one token each, and are attended apart.

    `query_start` is that of the other rows, counted from the first of their tokens; in a captured
    step, where all rows are alike, that of all.
    """

    pool: DeviceKvPool
    page_tables: torch.Tensor  # [slots, pages] int32
    token_ids: torch.Tensor  # [tokens] int32
    positions: torch.Tensor  # [tokens] int32
    token_slot: torch.Tensor  # [tokens] int32, -1: padding
    row_slot: torch.Tensor  # [rows] int32
    kv_lens: torch.Tensor  # [rows] int32, 0: padding
    query_start: torch.Tensor  # [other rows + 1] int32
    num_decode_rows: int
    max_query_len: int
    max_kv_len: int | None  # None: what the page tables can hold
    logit_tokens: torch.Tensor | None  # [logits] int32; None: every token in turn
    pooled_tokens: torch.Tensor  # [pooled] int32
    is_captured: bool = False  # padded, and perhaps replayed later
    logits_out: torch.Tensor | None = None  # [logits, vocabulary] float32: where logits go

    @property
    def num_tokens(self) -> int:
        """Tokens, with padding."""
        return self.positions.shape[0]

    def layer(self, spec: AttentionSpec) -> PagedLayer:
        """The step's pages as a layer's attention sees them."""
        pools = (self.pool.keys[spec.layer], self.pool.values[spec.layer])
        scales = spec.kv_scales if pools[0].dtype == FP8 else None
        return PagedLayer(
            keys=pools[0],
            values=pools[1],
            page_tables=self.page_tables,
            scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks=spec.sinks.scores if isinstance(spec.sinks, SinksWeight) else None,
            key_scale=1.0 if scales is None else scales.key,
            value_scale=1.0 if scales is None else scales.value,
        )


@dataclass(frozen=True, slots=True)
class HostRows:
    """Lengths of a step's rows as the host knows them."""

    query_lens: IntArray
    kv_lens: IntArray

    @property
    def num_decode_rows(self) -> int:
        """Leading rows of one token."""
        longer = np.flatnonzero(self.query_lens != 1)
        return int(longer[0]) if longer.size else int(self.query_lens.size)
