"""Router and experts of the reference backend: their handle, and who gets which token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from trunkline.kernels.specs import ExpertsSpec, LinearPart, LinearSpec
from trunkline.kernels.torch_reference.weights import HeightCache, LinearWeight


class ExpertsWeight:
    """A linear for the router and two for each expert."""

    def __init__(self, spec: ExpertsSpec, like: torch.Tensor, cache: HeightCache) -> None:
        def linear(in_features: int, *parts: LinearPart) -> LinearWeight:
            return LinearWeight(LinearSpec(in_features, parts), like, cache)

        hidden, width = spec.hidden_size, spec.width
        experts = range(spec.num_experts)
        gate_up = LinearPart("gate_proj", width), LinearPart("up_proj", width)
        self.spec = spec
        self.router = linear(hidden, LinearPart("gate", spec.num_experts))
        self.gate_ups = [linear(hidden, *gate_up) for _ in experts]
        self.downs = [linear(width, LinearPart("down_proj", hidden)) for _ in experts]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.spec.shapes

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in (self.router, *self.gate_ups, *self.downs))

    def load(self, part: str, tensor: torch.Tensor) -> None:
        if not part.startswith("experts."):
            self.router.load(part, tensor)
            return
        _, number, name = part.split(".", 2)
        linears = self.downs if name.startswith("down_proj") else self.gate_ups
        linears[int(number)].load(name, tensor)


def route(logits: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token, best first, and their shares.

    Args:
        logits: [tokens, experts] float32.
        spec: how many are chosen, and whether their shares sum to one.

    Returns:
        [tokens, top_k] int64 and [tokens, top_k] float32.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    chosen = order[:, : spec.top_k].contiguous()
    exponentials = (logits - logits.amax(-1, keepdim=True)).exp_()
    shares = exponentials.gather(-1, chosen) / exponentials.sum(-1, keepdim=True)
    if spec.renormalise:
        shares /= shares.sum(-1, keepdim=True)
    return chosen, shares


def by_expert(chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Every expert that has tokens, with its pairs: `token * top_k + choice`, ascending."""
    ordered, pairs = torch.sort(chosen.flatten(), stable=True)
    experts, counts = torch.unique_consecutive(ordered, return_counts=True)
    yield from zip(experts.tolist(), torch.split(pairs, counts.tolist()), strict=True)
