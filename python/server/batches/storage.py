"""The storage directory: where file contents lie, and how they get there without a torn one.

    state.sqlite3   what there is (`database.py`)
    files/          contents by file id; whole and on disk before the database names them
    incoming/       contents on their way

A name never comes from a client. What no file of the database names is left by a crash: `sweep`
removes it when it is old enough to be nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

ABANDONED_S: Final = 3600.0  # what nobody has written to for this long is nobody's
STATE_NAME: Final = "state.sqlite3"


class Storage:
    """File contents below one directory. Every method but `open` and `incoming` may block."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files = root / "files"
        self._incoming = root / "incoming"

    @property
    def state_path(self) -> Path:
        """Where the database lies."""
        return self.root / STATE_NAME

    def prepare(self) -> None:
        """Make the directories, readable by their owner only.

        Raises:
            OSError: they cannot be made or written to.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self._files, self._incoming):
            path.mkdir(mode=0o700, exist_ok=True)
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A path for contents that are to be published; what is left there is removed."""
        path = self._incoming / secrets.token_hex(16)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def publish(self, path: Path, file_id: str) -> None:
        """Make written contents those of a file, whole and on disk on return."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.rename(self._files / file_id)
        _sync_directory(self._files)

    def open(self, file_id: str) -> BinaryIO:
        """Open a file's contents.

        Takes no time, and must not be left to a thread: who is cancelled meanwhile never gets the
        file, and cannot close it.

        Raises:
            FileNotFoundError: there are none, or no more.
        """
        return (self._files / file_id).open("rb")

    def remove(self, file_id: str) -> None:
        """Remove a file's contents, if there are any."""
        (self._files / file_id).unlink(missing_ok=True)

    def sweep(self, known: Set[str]) -> None:
        """Remove abandoned contents, those in `files/` only if `known` does not name them."""
        oldest = time.time() - ABANDONED_S
        for directory, keep in ((self._incoming, frozenset[str]()), (self._files, known)):
            for entry in os.scandir(directory):
                with contextlib.suppress(FileNotFoundError):
                    if entry.name not in keep and entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
