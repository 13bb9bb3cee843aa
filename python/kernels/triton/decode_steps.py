"""Steps in which every row has one token, captured by number of rows.

A step runs in the least bucket that holds it; the rows that are missing have no length, read
nothing, and draw for a slot that no sequence has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trunkline.kernels.triton.graphs import Captured, batch_buckets, capture_pool
from trunkline.plan import LOGIT_POOLED, Plan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Computed:
    """What a forward pass leaves on the device."""

    logits: torch.Tensor  # [logits, vocabulary] float32
    token_finite: torch.Tensor  # [tokens] bool: hidden states have finite elements only
    pooled: torch.Tensor  # [pooled, width] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketWork:
    """What is captured for one number of rows."""

    forward: Callable[[], Computed]
    draw: Callable[[], dict[str, torch.Tensor]]


class DecodeSteps:
    """Forward pass and plain draw by bucket: a graph each, because most draws need no more."""

    def __init__(
        self, largest: int, prepare: Callable[[int], BucketWork], device: torch.device
    ) -> None:
        """Capture, the largest first: the others then find room in its memory.

        Args:
            largest: rows of the largest bucket; 0: none.
            prepare: gives the work of a bucket, whose inputs lie where every step's will.
            device: where it runs.
        """
        started_at = time.monotonic()
        self._buckets = batch_buckets(largest)
        self._forwards: dict[int, Captured[Computed]] = {}
        self._draws: dict[int, Captured[dict[str, torch.Tensor]]] = {}
        pool = capture_pool(device)
        for bucket in reversed(self._buckets):
            work = prepare(bucket)
            self._forwards[bucket] = Captured(work.forward, pool)
            self._draws[bucket] = Captured(work.draw, pool)
        if self._buckets and device.type == "cuda":
            logger.info(
                "Captured decode steps of %s rows in %.1f s",
                ", ".join(map(str, self._buckets)),
                time.monotonic() - started_at,
            )

    def bucket(self, plan: Plan) -> int | None:
        """The bucket of a step whose rows have one token and logits each; None: it is another."""
        num_rows = plan.row_slot.size
        if not self._buckets or num_rows > self._buckets[-1]:
            return None
        if {plan.token_ids.size, plan.logit_tokens.size} != {num_rows}:
            return None
        if (plan.logit_flags & LOGIT_POOLED).any():
            return None
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    def forward(self, bucket: int) -> Computed:
        """Launch a forward pass."""
        return self._forwards[bucket].replay()

    def draw(self, bucket: int) -> dict[str, torch.Tensor]:
        """Launch the draw of one token per row from the logits of `forward`."""
        return self._draws[bucket].replay()
