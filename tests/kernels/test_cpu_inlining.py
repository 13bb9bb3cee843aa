"""That the compiler has put every SIMD instruction in its place."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from trunkline import _core

SYMBOLS = 2  # type of the section, whose link is the section of their names


def symbol_names(elf: bytes) -> bytes:
    """The names of a 64-bit little-endian ELF file's own symbols, zero-terminated; maybe none."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    for section in sections:
        if section[1] == SYMBOLS:
            _, _, _, _, offset, length, *_ = sections[section[6]]
            return elf[offset : offset + length]
    return b""


def test_no_intrinsic_is_called_as_a_function() -> None:
    """One that is has lost its target features on the way: slow, with equal results."""
    names = symbol_names(Path(_core.__file__).read_bytes())
    if b"run_linear" not in names:
        pytest.skip("the extension has no symbols")
    called = {name for name in names.split(b"\0") if b"_mm256_" in name or b"_mm512_" in name}
    assert not called
