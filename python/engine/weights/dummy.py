"""Invented weights of the right shapes, for tests and for measuring without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.weights.layout import Shape, expected_tensors

if TYPE_CHECKING:
    import torch

SEED = 0
STANDARD_DEVIATION = 0.02


class DummyWeights:
    """Implements `WeightSource`: norms and scales that multiply by one, normal noise for all else.

    Each tensor is the same every time.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config

    def shapes(self) -> dict[str, Shape]:
        return expected_tensors(self._config)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch  # not at the top: the HTTP process opens checkpoints without torch

        dtype = getattr(torch, self._config.dtype)
        generator = torch.Generator().manual_seed(SEED)
        for name, shape in self.shapes().items():
            if name.endswith("norm.weight"):
                yield name, torch.full(shape, 1.0 - self._config.norm_offset, dtype=dtype)
            elif name.endswith("_scale"):
                yield name, torch.ones(shape, dtype=dtype)
            else:
                values = torch.empty(shape).normal_(0, STANDARD_DEVIATION, generator=generator)
                yield name, values.to(dtype)
