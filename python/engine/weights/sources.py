"""What a format has to offer, and the checkpoint that is put together from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trunkline.engine.chat_template import ChatTemplate, TemplateSource
from trunkline.engine.checkpoint import GenerationDefaults
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.tokenizer import Tokenizer
from trunkline.engine.weights.layout import Shape, check_tensors

if TYPE_CHECKING:
    import torch

    from trunkline.kernels import BlockTensor


class WeightSource(Protocol):
    """Tensors under their Hugging Face names."""

    def shapes(self) -> dict[str, Shape]:
        """Every tensor's shape, without reading weights."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Checkpoint.tensors`."""


@runtime_checkable
class BlockSource(Protocol):
    """A weight source that may store matrices as quantised blocks."""

    def matrix_kinds(self) -> frozenset[str]:
        """As `BlockCheckpoint.matrix_kinds`."""

    def stored_tensors(
        self, kinds: frozenset[str]
    ) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
        """As `BlockCheckpoint.stored_tensors`."""


class TokenizerSource(Protocol):
    """A tokenizer's files, and the chat templates beside them."""

    def exists(self) -> bool:
        """Whether there is anything to load at all."""

    def load(self) -> Tokenizer:
        """Read the tokenizer. Raises CheckpointError."""

    def templates(self) -> TemplateSource | None:
        """The chat templates, None if there are none. Raises CheckpointError."""


class OpenedCheckpoint:
    """Implements `Checkpoint` and `BlockCheckpoint` on top of its parts."""

    def __init__(
        self,
        *,
        source: str,
        config: DecoderConfig,
        generation: GenerationDefaults,
        tokenizer_source: TokenizerSource,
        weights: WeightSource,
        template_file: Path | None,
    ) -> None:
        """Put the parts together; nothing is read yet.

        Args:
            source: where the model comes from.
            config: the architecture.
            generation: stop ids and sampling of the model's files, without the tokenizer's.
            tokenizer_source: the tokenizer.
            weights: the tensors.
            template_file: a chat template to use instead of the tokenizer's.
        """
        self.source = source
        self.config = config
        self._generation = generation
        self._tokenizer_source = tokenizer_source
        self._weights = weights
        self._template_file = template_file

    @cached_property
    def generation(self) -> GenerationDefaults:
        eos = self.tokenizer.eos_id if self._tokenizer_source.exists() else None
        ids = {*self._generation.eos_token_ids, *(() if eos is None else (eos,))}
        return replace(self._generation, eos_token_ids=tuple(sorted(ids)))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer_source.load()

    @cached_property
    def chat_template(self) -> ChatTemplate:
        if self._template_file is None:
            source = self._tokenizer_source.templates()
        else:
            source = TemplateSource.from_file(self._template_file)
        return ChatTemplate(source, self.tokenizer.named_tokens)

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        shapes = self._weights.shapes()
        check_tensors(self.config, shapes, self.source)
        return frozenset(shapes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        _ = self.tensor_names  # checked against the config before anything is read
        return self._weights.tensors()

    @property
    def matrix_kinds(self) -> frozenset[str]:
        weights = self._weights
        return weights.matrix_kinds() if isinstance(weights, BlockSource) else frozenset()

    def stored_tensors(
        self, kinds: frozenset[str]
    ) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
        if not isinstance(self._weights, BlockSource):
            return self.tensors()
        _ = self.tensor_names
        return self._weights.stored_tensors(kinds)
