"""Who of several processes works on the batches: a lease in the database.

A holder renews it while it works and lets go of it when there is nothing to do. It lapses when it
is not renewed in time, or at once when its holder is a process of this machine that is no more.
Every grant has a new token; a write that `check`s its token in the same transaction cannot happen
after another has taken over, however long its process was suspended.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

LEASE_S: Final = 30.0


class LeaseLost(Exception):
    """Another process has taken over."""


class Lease:
    """One contender; its methods run in the database's thread, inside a transaction."""

    def __init__(self, clock: Callable[[], float] = time.time, identity: str | None = None) -> None:
        self._clock = clock
        self._holder = identity or _own_identity()

    def acquire(self, connection: sqlite3.Connection) -> int | None:
        """Take the lease; the token of the grant, None while another holds it."""
        row = connection.execute("SELECT token, holder, expires_at FROM lease").fetchone()
        now = self._clock()
        is_free = row["holder"] in (None, self._holder) or row["expires_at"] <= now
        if not is_free and not is_gone(row["holder"]):
            return None
        token = int(row["token"]) + 1
        connection.execute(
            "UPDATE lease SET token = ?, holder = ?, expires_at = ?",
            (token, self._holder, now + LEASE_S),
        )
        return token

    def renew(self, connection: sqlite3.Connection, token: int) -> None:
        """Keep the lease for another `LEASE_S`.

        Raises:
            LeaseLost: it is another's.
        """
        check(connection, token)
        connection.execute("UPDATE lease SET expires_at = ?", (self._clock() + LEASE_S,))

    def release(self, connection: sqlite3.Connection, token: int) -> None:
        """Let go of the lease, if it is still held."""
        connection.execute("UPDATE lease SET holder = NULL WHERE token = ?", (token,))


def check(connection: sqlite3.Connection, token: int) -> None:
    """Check, inside a transaction that writes, that a grant still holds.

    Raises:
        LeaseLost: it does not.
    """
    row = connection.execute("SELECT token, holder FROM lease").fetchone()
    if row["token"] != token or row["holder"] is None:
        raise LeaseLost("another process has taken over the batches")


def _own_identity() -> str:
    pid = os.getpid()
    return json.dumps([_machine(), pid, _start_of(pid), uuid.uuid4().hex])


def is_gone(holder: str) -> bool:
    """Whether a holder is surely no more: a process of this boot and PID namespace that ended."""
    machine, pid, start, _ = json.loads(holder)
    return machine is not None and machine == _machine() and _start_of(pid) != start


def _machine() -> str | None:
    """What tells apart the process ids of two machines; None where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _start_of(pid: int) -> int | None:
    """When a process began, in ticks since boot; None if it is not running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])  # field 22 of proc(5)'s stat
