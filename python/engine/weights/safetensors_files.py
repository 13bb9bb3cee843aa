"""Weights in safetensors files; headers are checked against file sizes before anything is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.weights.layout import Shape
from trunkline.engine.weights.shards import DERIVED_SUFFIX, Shards

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsFiles:
    """Implements `WeightSource` for one file or several shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def shapes(self) -> dict[str, Shape]:
        return self._shards.merged({path: _read_header(path) for path in self._shards.files})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import SafetensorError, safe_open

        for path in self._shards.files:
            name = None
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in file.keys():
                        if not name.endswith(DERIVED_SUFFIX):
                            yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                where = f", tensor {name!r}" if name else ""
                raise CheckpointError(f"cannot read {path}{where}: {error}") from error


def _read_header(path: Path) -> dict[str, Shape]:
    """Names and shapes of a file's tensors.

    Raises:
        CheckpointError: the file is truncated, has no valid header, or holds tensors that are not
            floating point.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: its header would need "
                    f"{length + 8} bytes, the file has {size}; download it again"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    shapes = {}
    for name, entry in header.items():
        shapes[name], end = _read_entry(path, name, entry)
        if 8 + length + end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends at byte {8 + length + end}, the file "
                f"has {size}; download it again"
            )
    return shapes


def _read_entry(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[Shape, int]:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of tensor {name!r} is invalid") from error
    if dtype not in _ELEMENT_BYTES:
        if name.endswith(DERIVED_SUFFIX):
            return shape, end
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype}; supported are {', '.join(_ELEMENT_BYTES)}"
        )
    if end - start != math.prod(shape) * _ELEMENT_BYTES[dtype]:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} {list(shape)} cannot have {end - start} bytes"
        )
    return shape, end
