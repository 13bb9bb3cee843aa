"""The paged KV pool of the reference backend.

Layout: one tensor `[layers, 2, kv_heads, pages * page_size, head_dim]`; position p of a sequence
lies at slot `page * page_size + p % page_size`. Gathering pages of one layer then yields a block of
keys per head that is contiguous, ready for a batched product.
"""

from __future__ import annotations

import torch

from trunkline.kernels.interface import PageMove
from trunkline.kernels.specs import KvSpec


class TorchKvPool:
    """Keys and values; all zeros at the start, so page 0 stays zero for ever."""

    def __init__(self, spec: KvSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        num_slots = spec.num_pages * spec.page_size
        self.data = torch.zeros(
            (spec.num_layers, 2, spec.num_kv_heads, num_slots, spec.head_dim),
            dtype=dtype,
            device=device,
        )
        paged = (spec.num_kv_heads, spec.num_pages, spec.page_size * spec.head_dim)
        self.keys = [layer[0].view(paged) for layer in self.data]
        self.values = [layer[1].view(paged) for layer in self.data]

    @property
    def page_bytes(self) -> int:
        return self.num_bytes // self.spec.num_pages

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def write(self, layer: int, slots: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Store keys and values of tokens.

        Args:
            layer: which layer.
            slots: [tokens] int64.
            kv: each [tokens, kv_heads, head_dim].
        """
        for index, tensor in enumerate(kv):
            self.data[layer, index].index_copy_(1, slots, tensor.transpose(0, 1))

    def move(self, moves: list[PageMove]) -> None:
        """Copy the leading tokens of pages, all layers."""
        size = self.spec.page_size
        sources = [m.source * size + token for m in moves for token in range(m.num_tokens)]
        targets = [m.destination * size + token for m in moves for token in range(m.num_tokens)]
        device = self.data.device
        copied = self.data.index_select(3, torch.tensor(sources, device=device))
        self.data.index_copy_(3, torch.tensor(targets, device=device), copied)
