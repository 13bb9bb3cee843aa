"""The parts of a model in one GGUF file: configuration, tokenizer, chat template, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trunkline.engine.chat_template import TemplateSource
from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.tokenizer import Tokenizer
from trunkline.engine.weights.config_json import parse_config
from trunkline.engine.weights.gguf_config import (
    ROPE_FACTORS,
    config_values,
    frequency_factors,
    hugging_face_name,
    is_permuted,
    norm_offset,
)
from trunkline.engine.weights.gguf_file import GgufFile
from trunkline.engine.weights.gguf_tokenizer import build_tokenizer
from trunkline.engine.weights.layout import Shape
from trunkline.engine.weights.overrides import OverriddenValues

if TYPE_CHECKING:
    import torch

    from trunkline.kernels import BlockTensor

Array = np.ndarray[Any, Any]

CHAT_TEMPLATE = "tokenizer.chat_template"
CHAT_TEMPLATE_NAMES = "tokenizer.chat_templates"


def open_gguf(path: Path) -> GgufFile:
    """Open a model's file.

    Raises:
        CheckpointError: the file is unreadable or truncated, or only a part of a model.
    """
    file = GgufFile(path)
    if (count := file.get("split.count", int, 1)) != 1:
        raise CheckpointError(
            f"{path} is one of {count} parts; merge them into one file first "
            "(llama-gguf-split --merge)"
        )
    return file


def gguf_config(file: GgufFile, overrides: Mapping[str, Any]) -> DecoderConfig:
    """The architecture; `overrides` replace the metadata, in the spelling of a config.json.

    Raises:
        CheckpointError: something is missing or not supported; the message names it.
    """
    values = OverriddenValues(config_values(file), overrides)
    config = parse_config(values, str(file.path))
    values.refuse_unread()
    factors = frequency_factors(file)
    if not factors:
        return config
    if config.rope.kind != "default" or len(factors) != config.head_dim // 2:
        raise CheckpointError(
            f"{file.path}: {len(factors)} values in {ROPE_FACTORS!r} with rope scaling "
            f"{config.rope.kind!r} and heads of {config.head_dim} are not supported; supported are "
            "as many values as half the head, without other scaling"
        )
    rope = replace(config.rope, kind="factors", frequency_factors=factors)
    return replace(config, rope=rope)


class GgufTokenizerSource:
    """Implements `TokenizerSource` for the metadata of a file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def exists(self) -> bool:
        return True

    def load(self) -> Tokenizer:
        return build_tokenizer(self._file)

    def templates(self) -> TemplateSource | None:
        keys = {
            name: f"{CHAT_TEMPLATE}.{name}"
            for name in self._file.get_list(CHAT_TEMPLATE_NAMES, str) or []
        }
        keys["default"] = CHAT_TEMPLATE
        found = {name: self._file.get(key, str) for name, key in keys.items()}
        templates = {name: text for name, text in found.items() if text is not None}
        return TemplateSource(templates, str(self._file.path)) if templates else None


class GgufWeights:
    """Implements `WeightSource` and `BlockSource` for the tensors of a file."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        """Find the tensors' places; nothing is read yet.

        Raises:
            CheckpointError: a tensor that no supported model has.
        """
        self._file = file
        self._head_dim = head_dim
        self._architecture: str = file.metadata["general.architecture"]
        self._stored_names: dict[str, str] = {}  # by Hugging Face's name
        for name in file.tensors:
            if name == ROPE_FACTORS:
                continue
            renamed = hugging_face_name(self._architecture, name)
            if renamed is None:
                raise CheckpointError(
                    f"{file.path} has tensor {name!r}, for which no supported model has a place"
                )
            self._stored_names[renamed] = name

    def shapes(self) -> dict[str, Shape]:
        return {
            name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()
        }

    def matrix_kinds(self) -> frozenset[str]:
        stored = (self._file.tensors[name] for name in self._stored_names.values())
        return frozenset(tensor.kind.name for tensor in stored if len(tensor.shape) > 1)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch  # not at the top: the HTTP process opens checkpoints without torch

        for name, tensor in self.stored_tensors(frozenset()):
            assert isinstance(tensor, torch.Tensor)
            yield name, tensor

    def stored_tensors(
        self, kinds: frozenset[str]
    ) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
        import torch

        from trunkline.kernels import BlockTensor

        for name, stored in self._stored_names.items():
            tensor = self._file.tensors[stored]
            if tensor.kind.name in kinds and len(tensor.shape) == 2:
                rows = self._reordered(stored, self._file.read_rows(stored))
                yield name, BlockTensor(tensor.kind.name, tensor.shape, rows)
            else:
                values = self._file.read(stored)
                if offset := norm_offset(self._architecture, stored):
                    values -= offset
                yield name, torch.from_numpy(self._reordered(stored, values))
            self._file.release(stored)

    def _reordered(self, stored: str, rows: Array) -> Array:
        """Rows in Hugging Face's order."""
        if not is_permuted(self._architecture, stored):
            return rows
        # Rows of each head from (pair, half) order back to (half, pair) order.
        pairs = rows.reshape(-1, self._head_dim // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
