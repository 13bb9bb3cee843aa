"""Architectures by the name that `config.json` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.models.decoder import Decoder, ForwardResult
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
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "Qwen3MoeForCausalLM": Decoder,
    "GemmaForCausalLM": Decoder,
    "Gemma2ForCausalLM": Decoder,
    "Gemma3ForCausalLM": Decoder,
}


def needed_operations(config: DecoderConfig) -> frozenset[str]:
    """Operations of the kernels that the model needs, of those that a backend may lack."""
    layers = range(config.num_layers)
    sparse = any(config.experts_of(layer) is not None for layer in layers)
    return frozenset({"moe"}) if sparse else frozenset()


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
