"""What a model on disk offers, opened without reading its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trunkline.engine.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """`generation_config.json`: all stop ids of the model and its recommended sampling."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, float | int] = field(default_factory=dict)  # temperature, top_p, top_k, ...


class Checkpoint(Protocol):
    """A model's files, whichever their format (`weights/` implements it for each)."""

    @property
    def config(self) -> DecoderConfig:
        """The architecture."""

    @property
    def generation(self) -> GenerationDefaults:
        """Stop ids and default sampling."""

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors in Hugging Face's spelling (`model.layers.0.mlp.up_proj.weight`)."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, on the CPU, in stored dtype (GGUF: dequantised to float32).

        Raises:
            CheckpointError: a file is truncated or a tensor unreadable; the message names both.
        """


class CheckpointError(Exception):
    """The model cannot be loaded; the message names file, tensor and remedy."""
