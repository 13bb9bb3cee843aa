"""Between a client and an engine's loop: one interface for both ways to reach it.

It carries bytes and never looks into them. Every message bears the boot epoch of the engine life
that it belongs to, so that what was meant for (or said by) an engine that died is told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trunkline.engine.messages import EngineStatus

Deliver = Callable[[int, bytes], None]
Changed = Callable[[], None]


class Channel(Protocol):
    """The client's end. Everything happens in the asyncio loop in which `open` was called."""

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        """Begin; does not wait for the engine to be ready.

        Args:
            deliver: called with `(boot epoch, blob of events)` for each message of the engine.
            changed: called whenever `status` has another state or epoch than before.
        """

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        """Send one message to the engine; never blocks, and is silently lost if it has died."""

    def status(self) -> EngineStatus:
        """Where the engine stands now; never waits."""

    async def close(self) -> None:
        """Let go of the engine (and stop it, if this end owns it). Idempotent."""
