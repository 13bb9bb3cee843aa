"""Which requests an engine has begun to run, in a file that outlives its process.

The engine writes each request down before the first step that computes it; when the engine dies,
its supervisor reads who may have killed it. Old entries are overwritten: there is room for far more
than can run at once, and no key is used twice.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

CAPACITY: Final = 1 << 16
_ENTRY: Final = struct.Struct("<qQ")  # client, key; keys begin at 1


class EntryWriter:
    """The engine's side."""

    def __init__(self, path: Path) -> None:
        """Open the file; what other engines wrote stays until it is overwritten.

        All its room is taken now: a disk that is full later does not stop the engine.
        """
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        size = CAPACITY * _ENTRY.size
        while (begun := os.fstat(self._file).st_size) < size:
            os.pwrite(self._file, bytes(size - begun), begun)
        self._count = 0

    def add(self, entries: Iterable[tuple[int, int]]) -> None:
        """Write requests down, by client and key; when this returns, no death can undo it."""
        for client, key in entries:
            place = self._count % CAPACITY
            os.pwrite(self._file, _ENTRY.pack(client, key), place * _ENTRY.size)
            self._count += 1

    def close(self) -> None:
        """Free the file."""
        os.close(self._file)


def read_entries(path: Path, client: int) -> frozenset[int]:
    """Keys of a client's requests that are written down; none where nothing ever was."""
    data = b""
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
    whole = len(data) - len(data) % _ENTRY.size
    return frozenset(key for one, key in _ENTRY.iter_unpack(data[:whole]) if one == client)
