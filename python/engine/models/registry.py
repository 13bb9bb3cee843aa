"""Architectures by the name that `config.json` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.models.decoder import DenseDecoder, ForwardResult
from trunkline.kernels import Backend, Batch, Weight


class Model(Protocol):
    """What the runner and the loader need of a model."""

    @property
    def config(self) -> DecoderConfig:
        """The architecture."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every handle with the prefix of its tensors' names."""

    def forward(self, batch: Batch) -> ForwardResult:
        """Compute one step."""


# (config, backend, number of positions, whether the head is the embedding)
ModelFactory = Callable[[DecoderConfig, Backend, int, bool], Model]

MODELS: Mapping[str, ModelFactory] = {
    "LlamaForCausalLM": DenseDecoder,
    "MistralForCausalLM": DenseDecoder,
    "Qwen2ForCausalLM": DenseDecoder,
    "Qwen3ForCausalLM": DenseDecoder,
}


def model_factory(architecture: str) -> ModelFactory:
    """The factory of an architecture.

    Raises:
        ValueError: it is not supported; the message lists those that are.
    """
    if architecture not in MODELS:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return MODELS[architecture]
