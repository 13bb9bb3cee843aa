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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CAPACITY: Final = 1 << 16
# Client, key, boot epoch; keys begin at 1. None lies on two pages of the file: what a death could
# leave half written.
_ENTRY: Final = struct.Struct("<qQQ8x")


@dataclass(frozen=True, slots=True)
class Begun:
    """What a client finds: keys of its own requests, and whether the engine ran those of others.

    The keys are of all lives of the engine, `others` of the one that was asked for.
    """

    keys: frozenset[int]
    others: bool = False


class EntryWriter:
    """The engine's side."""

    def __init__(self, path: Path, epoch: int) -> None:
        """Open the file in the engine's life `epoch`; what others wrote stays until overwritten.

        All its room is taken now: a disk that is full later does not stop the engine.
        """
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        size = CAPACITY * _ENTRY.size
        while (begun := os.fstat(self._file).st_size) < size:
            os.pwrite(self._file, bytes(size - begun), begun)
        self._epoch = epoch
        self._count = 0

    def add(self, entries: Iterable[tuple[int, int]]) -> None:
        """Write requests down, by client and key; when this returns, no death can undo it."""
        for client, key in entries:
            place = self._count % CAPACITY
            os.pwrite(self._file, _ENTRY.pack(client, key, self._epoch), place * _ENTRY.size)
            self._count += 1

    def close(self) -> None:
        """Free the file."""
        os.close(self._file)


def read_entries(path: Path, client: int, epoch: int) -> Begun:
    """What is written down of a client's requests, and of others' in one life of the engine."""
    data = b""
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
    whole = len(data) - len(data) % _ENTRY.size
    keys, others = set(), False
    for one, key, life in _ENTRY.iter_unpack(data[:whole]):
        if one == client:
            keys.add(key)
        others = others or (key > 0 and one != client and life == epoch)
    return Begun(frozenset(keys), others)
