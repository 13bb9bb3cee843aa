"""What a model on disk offers, opened without reading its weights.

Importing this module does not import torch: the HTTP process opens checkpoints too, for
configuration and tokenizer only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from trunkline.engine.chat_template import ChatTemplate
    from trunkline.engine.models.config import DecoderConfig
    from trunkline.engine.tokenizer import Tokenizer
    from trunkline.kernels import BlockTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """`generation_config.json`: all stop ids of the model and its recommended sampling.

    `eos_token_ids` is the union of what generation_config.json, config.json and the tokenizer
    name, ascending. `sampling` holds only what the model recommends, of: temperature, top_p,
    top_k, min_p, repetition_penalty.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, float | int] = field(default_factory=dict)


class Checkpoint(Protocol):
    """A model's files, whichever their format (`weights/` implements it for each).

    Every property is computed at most once and then remembered.
    """

    @property
    def source(self) -> str:
        """Where the model comes from, for messages and logs: a path or a hub id."""

    @property
    def config(self) -> DecoderConfig:
        """The architecture."""

    @property
    def generation(self) -> GenerationDefaults:
        """Stop ids and default sampling."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            CheckpointError: there is none, or its kind is not supported; the message names it.
        """

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; without one, its `render` raises and says how to give one.

        Raises:
            CheckpointError: a template file is missing or does not parse.
        """

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors in Hugging Face's spelling (`model.layers.0.mlp.up_proj.weight`)."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, on the CPU, in stored dtype (GGUF: dequantised to float32).

        A tensor is the caller's to keep, and may be backed by the mapped file: do not write to it.

        Raises:
            CheckpointError: a file is truncated or a tensor unreadable; the message names both.
        """


@runtime_checkable
class BlockCheckpoint(Protocol):
    """A checkpoint whose format may store matrices as quantised blocks (GGUF)."""

    @property
    def matrix_kinds(self) -> frozenset[str]:
        """The ggml types of its matrices, those of plain floats included; empty: another format."""

    def stored_tensors(
        self, kinds: frozenset[str]
    ) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
        """As `Checkpoint.tensors`, but matrices of these ggml types as they are stored."""


class CheckpointError(Exception):
    """The model cannot be loaded; the message names file, tensor and remedy."""
