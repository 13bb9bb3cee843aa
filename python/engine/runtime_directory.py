"""The directory of an engine's socket and heartbeat: it goes with its owner, even a killed one.

An owner holds a lock on a file in it as long as it lives; whoever makes a directory removes those
whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "trunkline-"
_OWNER: Final = "owner"


class RuntimeDirectory:
    """A directory of this process's own."""

    def __init__(self, parent: str | None) -> None:
        """Make one in `parent` (None: where temporary files go), and remove what the dead left."""
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        locked = self.path / "locking"
        self._lock = locked.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        locked.rename(self.path / _OWNER)  # it is never there without its lock
        _sweep(self.path.parent)

    def close(self) -> None:
        """Remove it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        # No such file, another user's, or held by its owner: not ours to remove.
        with contextlib.suppress(OSError), (path / _OWNER).open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
