"""The KV pool of the device: [keys and values, layers, pages, page size, kv heads, head dim]."""

from __future__ import annotations

import torch

from trunkline.kernels.specs import KvSpec


class DeviceKvPool:
    """Keys and values of all layers. Page 0 is never read: padding rows have no length."""

    def __init__(self, spec: KvSpec, dtype: torch.dtype, device: torch.device) -> None:
        shape = (
            2,
            spec.num_layers,
            spec.num_pages,
            spec.page_size,
            spec.num_kv_heads,
            spec.head_dim,
        )
        self.spec = spec
        # Zeros: what a row does not reach is multiplied by a weight of 0, and must not be NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = self.data[0], self.data[1]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_bytes // self.spec.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.data.nbytes
