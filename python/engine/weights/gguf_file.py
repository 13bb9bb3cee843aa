"""The GGUF container: metadata and tensors of a file, mapped rather than read.

It knows the format and nothing of models. Dequantisation is the `gguf` package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np

from trunkline.engine.checkpoint import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
Value = TypeVar("Value")
MAX_DIMENSIONS = 4

_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in torch's order: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name.

    Strings are str, numbers int or float, arrays lists. Single-precision floats come out as their
    shortest decimal, so that 1e-5 is not 9.999999747378752e-06.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header.

        Raises:
            CheckpointError: not a GGUF file, a version or tensor type that is not supported, or a
                file shorter than its header says.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise CheckpointError(f"cannot read {path}: {error}") from error
        header = _Header(path, self._map)
        self.metadata = header.metadata
        self.tensors = header.tensors
        for tensor in self.tensors.values():
            if tensor.offset + tensor.num_bytes > len(self._map):
                raise CheckpointError(
                    f"{path} is truncated: tensor {tensor.name!r} ends at byte "
                    f"{tensor.offset + tensor.num_bytes}, the file has {len(self._map)}; "
                    "download it again"
                )

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value | None:
        """The metadata value of `key`, or `default` if there is none.

        Raises:
            CheckpointError: the value is not of type `kind`.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:  # bool is no int here
            raise CheckpointError(
                f"{self.path}: metadata key {key!r} is {str(value)[:80]!r}, not of type "
                f"{kind.__name__}"
            )
        return value

    def get_list(self, key: str, kind: type[Value]) -> list[Value] | None:
        """The metadata array of `key` with elements of type `kind`, None if there is none.

        Raises:
            CheckpointError: the value is anything else.
        """
        values = self.get(key, list)
        if values and type(values[0]) is not kind:  # all elements of an array are of one type
            raise CheckpointError(
                f"{self.path}: the elements of metadata key {key!r} are not of type {kind.__name__}"
            )
        return values

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the tensor `name`, dequantised, as an array of its own.

        Raises:
            KeyError: no such tensor.
        """
        tensor = self.tensors[name]
        values = _dequantize(self.read_rows(name), tensor.kind).reshape(tensor.shape)
        # float32 is a view of the mapping: callers get memory of their own, writable
        return values.copy() if tensor.kind == gguf.GGMLQuantizationType.F32 else values

    def read_rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of the tensor `name`, row by row: a view of the file.

        Raises:
            KeyError: no such tensor.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return raw.reshape(*tensor.shape[:-1], -1) if tensor.shape else raw

    def release(self, name: str) -> None:
        """Give back the memory of the tensor `name`; what is read again comes from the file."""
        tensor = self.tensors[name]
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and start < end:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def _dequantize(
    rows: np.ndarray[Any, np.dtype[np.uint8]], kind: gguf.GGMLQuantizationType
) -> np.ndarray[Any, np.dtype[np.float32]]:
    values: np.ndarray[Any, np.dtype[np.float32]] = gguf.dequantize(rows, kind)
    return values


class _Header:
    """Parses the header of a mapped file, checking every length against the file's."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 0
        if self._take(4) != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self._number("<I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path} has GGUF version {version}; supported are "
                f"{' and '.join(map(str, VERSIONS))}, little-endian: convert the model again"
            )
        num_tensors, num_pairs = self._number("<Q"), self._number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CheckpointError(f"{path}: general.alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise CheckpointError(f"{path} has tensor {name!r} twice")
            self.tensors[name] = GgufTensor(
                name, shape, kind, start + offset, _num_bytes(path, name, shape, kind)
            )

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated: its header needs at least {end} bytes, the file has "
                f"{len(self._data)}; download it again"
            )
        part = self._data[self._position : end]
        self._position = end
        return part

    def _number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _string(self) -> str:
        start = self._position
        raw = self._take(self._number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._path}: the string at byte {start} of the header is not UTF-8"
            ) from error

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        dtype = self._scalar_type(kind)
        return _plain(np.frombuffer(self._take(dtype.itemsize), dtype))[0]

    def _array(self) -> list[Any]:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        dtype = self._scalar_type(kind)
        return _plain(np.frombuffer(self._take(count * dtype.itemsize), dtype))

    def _scalar_type(self, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise CheckpointError(
                f"{self._path}: metadata value type {kind} at byte {self._position} is unknown"
            )
        return _SCALARS[kind]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self._string()
        num_dimensions = self._number("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has {num_dimensions} dimensions, at most "
                f"{MAX_DIMENSIONS} are possible"
            )
        shape = tuple(reversed([self._number("<Q") for _ in range(num_dimensions)]))
        number = self._number("<I")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has the unknown ggml type {number}; a newer gguf "
                "package may know it"
            ) from error
        return name, shape, kind, self._number("<Q")


def _plain(values: np.ndarray[Any, Any]) -> list[Any]:
    if values.dtype == np.dtype("<f4"):
        return [float(str(value)) for value in values]
    items: list[Any] = values.tolist()
    return items


def _num_bytes(
    path: Path, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> int:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if (shape[-1] if shape else 1) % block_size:
        raise CheckpointError(
            f"{path}: tensor {name!r} has rows of {shape[-1]} elements, not a multiple of "
            f"{kind.name}'s block of {block_size}"
        )
    try:
        _dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} has ggml type {kind.name}, which the installed gguf package "
            "cannot dequantise; a newer one may"
        ) from error
    return math.prod(shape) // block_size * block_bytes
