"""One more client of an engine process that another process supervises."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trunkline.engine.channel import Changed, Deliver, SocketLink
from trunkline.engine.entries import Begun, read_entries
from trunkline.engine.messages import EngineStatus
from trunkline.engine.process import HEARTBEAT, Heartbeat, entries_path, socket_path


class AttachedEngine:
    """The `Channel` of such a client: messages and heartbeat go directly, the status is told.

    The supervisor is `process.EngineProcess`, whose own client has number 1.
    """

    def __init__(self, directory: Path, client: int) -> None:
        """Prepare.

        Args:
            directory: where the engine's socket and heartbeat are.
            client: number of this client, which no other client of the engine ever had.
        """
        self._directory = directory
        self._client = client
        self._heartbeat = Heartbeat(directory / HEARTBEAT)
        self._status = EngineStatus(state="starting", epoch=0)
        self._link: SocketLink | None = None
        self._changed: Changed | None = None

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        """See `Channel`."""
        self._changed = changed
        self._link = SocketLink(socket_path(self._directory), self._client, deliver)

    def tell(self, status: EngineStatus) -> None:
        """Take what the supervisor says of the engine."""
        assert self._changed is not None, "open comes first"
        self._status = status
        self._changed()

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        """See `Channel`."""
        assert self._link is not None, "open comes first"
        self._link.send(kind, epoch, payload)

    def status(self) -> EngineStatus:
        """See `Channel`."""
        return msgspec.structs.replace(self._status, heartbeat_age_s=self._heartbeat.age_s())

    def entered(self, epoch: int) -> Begun:
        """See `Channel`."""
        return read_entries(entries_path(self._directory), self._client, epoch)

    async def close(self) -> None:
        """See `Channel`; the engine goes on."""
        if self._link is not None:
            self._link.close()
