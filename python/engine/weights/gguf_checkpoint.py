"""A model in one GGUF file: configuration, tokenizer, chat template and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.engine.chat_template import ChatTemplate, TemplateSource
from trunkline.engine.checkpoint import CheckpointError, GenerationDefaults
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.tokenizer import Tokenizer
from trunkline.engine.weights.config_json import parse_config
from trunkline.engine.weights.gguf_config import (
    ROPE_FACTORS,
    config_values,
    frequency_factors,
    hugging_face_name,
    is_permuted,
    read_generation,
)
from trunkline.engine.weights.gguf_file import GgufFile
from trunkline.engine.weights.gguf_tokenizer import build_tokenizer
from trunkline.engine.weights.layout import Shape, check_tensors

if TYPE_CHECKING:
    import torch

CHAT_TEMPLATE = "tokenizer.chat_template"


class GgufCheckpoint:
    """Implements `Checkpoint` for a `.gguf` file."""

    def __init__(self, path: Path, overrides: Mapping[str, Any]) -> None:
        """Open the file and read its header.

        Args:
            path: the file.
            overrides: values that replace those of the metadata, in the spelling of a config.json.

        Raises:
            CheckpointError: the file is unreadable, truncated or of an unsupported architecture.
        """
        self.source = str(path)
        self._file = GgufFile(path)
        config = parse_config(config_values(self._file) | dict(overrides), self.source)
        rope = replace(config.rope, frequency_factors=frequency_factors(self._file))
        self.config: DecoderConfig = replace(config, rope=rope)
        if "split.count" in self._file.metadata and self._file.metadata["split.count"] > 1:
            raise CheckpointError(
                f"{path} is one of {self._file.metadata['split.count']} parts; merge them into one "
                "file first (llama-gguf-split --merge)"
            )
        self._names: dict[str, str] = {}  # Hugging Face's name -> GGUF's
        for name in self._file.tensors:
            if name == ROPE_FACTORS:
                continue
            renamed = hugging_face_name(name)
            if renamed is None:
                raise CheckpointError(
                    f"{path} has tensor {name!r}, for which {self.config.architecture} has no place"
                )
            self._names[renamed] = name
        check_tensors(self.config, self.shapes, self.source)

    @cached_property
    def generation(self) -> GenerationDefaults:
        return read_generation(self._file)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self._file)

    @cached_property
    def template_source(self) -> TemplateSource | None:
        """The chat templates of the metadata, None if there is none."""
        metadata = self._file.metadata
        names = metadata.get("tokenizer.chat_templates", [])
        named = {name: metadata[f"{CHAT_TEMPLATE}.{name}"] for name in names}
        if CHAT_TEMPLATE in metadata:
            named["default"] = metadata[CHAT_TEMPLATE]
        return TemplateSource(named, self.source) if named else None

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.template_source, self.tokenizer.named_tokens)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor by its Hugging Face name."""
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._names)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch  # not at the top: the HTTP process opens checkpoints without torch

        architecture = self._file.metadata["general.architecture"]
        for name, stored in self._names.items():
            values = torch.from_numpy(self._file.read(stored))  # float32, CPU
            if is_permuted(architecture, stored):
                values = _undo_permutation(values, self.config.head_dim)
            yield name, values


def _undo_permutation(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from (pair, half) order back to (half, pair) order."""
    shape = values.shape
    pairs = values.reshape(-1, head_dim // 2, 2, *shape[1:])
    return pairs.transpose(1, 2).reshape(shape)
