"""What the kernels of one step share: rows, parameters and what is known of each sample so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trunkline.kernels.triton.penalties import Samples, SlotTables


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """A step's rows, as they are and adjusted."""

    logits: torch.Tensor  # [L, V] float32
    maxima: torch.Tensor  # [L, groups] float32, NaN: not finite
    adjusted: torch.Tensor | None  # [S, V] float32, written where `is_adjusted`
    adjusted_maxima: torch.Tensor | None  # [S, groups] float32
    is_adjusted: torch.Tensor | None  # [S] int32
    best: torch.Tensor  # [S] float32, largest logit
    temperature: torch.Tensor  # [S] float32, 1 for greedy samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawState:
    """What a draw needs besides, and what is known of it."""

    rows: RowState
    samples: Samples
    slots: SlotTables
    kind: torch.Tensor  # [S] int32
    bound: torch.Tensor  # [S] float32, scaled logits below do not matter for the cuts
    floor: torch.Tensor  # [S] float32, scaled logits below cannot be drawn
    last_key: torch.Tensor  # [S] int32, largest key that is kept
    last_id: torch.Tensor  # [S] int32, largest id that is kept with it

    @property
    def num_samples(self) -> int:
        return self.samples.logit_index.shape[0]
