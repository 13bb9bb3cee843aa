"""Weights in PyTorch's own files (`pytorch_model.bin`), read without running what they contain."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.weights.layout import Shape
from trunkline.engine.weights.shards import DERIVED_SUFFIX, Shards

if TYPE_CHECKING:
    import torch


class PytorchFiles:
    """Implements `WeightSource` for one file or several shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def shapes(self) -> dict[str, Shape]:
        found: dict[Path, dict[str, Shape]] = {
            path: {name: tuple(tensor.shape) for name, tensor in _load(path).items()}
            for path in self._shards.files
        }
        return self._shards.merged(found)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self._shards.files:
            for name, tensor in _load(path).items():
                if not name.endswith(DERIVED_SUFFIX):
                    yield name, tensor


def _load(path: Path) -> Mapping[str, torch.Tensor]:
    import torch  # not at the top: the HTTP process opens checkpoints without torch

    try:
        values = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, or is damaged, and is not loaded: {error}"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path}, it may be truncated (download it again): {error}"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not named tensors")
    for name, tensor in values.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            if isinstance(name, str) and name.endswith(DERIVED_SUFFIX):
                continue
            raise CheckpointError(f"{path}: {name!r} is not a floating-point tensor")
    return values
