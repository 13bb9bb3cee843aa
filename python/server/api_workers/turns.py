"""In which order HTTP processes come back to an engine that was started again.

One after another they try their suspects (`engine/recovery.py`); only then is the engine opened to
all else that they have. Anything else in it would make a suspect die of another's guilt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from trunkline.engine.client import Client
from trunkline.engine.fleet import Fleet
from trunkline.engine.messages import EngineStatus
from trunkline.server import logs
from trunkline.server.api_workers.orders import Told

PATIENCE_S: Final = 60.0  # of silence; who tries suspects gives a sign of life each second
_POLL_S: Final = 0.01


class Engine(Protocol):
    """What `engine/process.py` supervises."""

    def status(self) -> EngineStatus:
        """Where the engine stands now."""

    def open_to_all(self, epoch: int) -> None:
        """Let in more than suspects, if this is still the engine's life."""


class Member(Protocol):
    """An API worker. `settled` has the epoch of each rank for which it has said so.

    `heard_at` is when it last said anything, in monotonic seconds.
    """

    heard_at: float

    @property
    def is_alive(self) -> bool:
        """Whether it can answer."""

    @property
    def settled(self) -> dict[int, int]:
        """Epochs by rank; empty as long as the worker takes no orders."""

    def send(self, order: Told) -> None:
        """Tell it of an engine; never waits."""


class Turns:
    """Lets the members to each engine life, after the first process itself."""

    def __init__(
        self,
        engines: Sequence[Engine],
        client: Client | Fleet,
        members: Callable[[], Collection[Member]],
    ) -> None:
        """Prepare; `client` is the first process's own, of the same engines."""
        self._engines = engines
        self._client = client
        self._members = members
        self._locks = [asyncio.Lock() for _ in engines]

    async def take(self, rank: int) -> None:
        """Have all processes try their suspects at an engine that is for these, and open it to all.

        A member that says nothing for `PATIENCE_S` is passed over: it hangs. Where one dies in its
        turn, nobody tries suspects any more, because its own may still be in the engine.
        """
        engine = self._engines[rank]
        epoch = engine.status().epoch
        try:
            async with self._locks[rank]:
                await self._try_suspects(rank, epoch)
        finally:  # whatever has gone wrong, requests must not wait for ever
            engine.open_to_all(epoch)

    async def _try_suspects(self, rank: int, epoch: int) -> None:
        def is_over() -> bool:
            status = self._engines[rank].status()
            return status.epoch != epoch or status.access != "suspects"

        while self._client.replicas[rank].is_testing and not is_over():
            await asyncio.sleep(_POLL_S)
        for member in list(self._members()):
            if is_over():
                return
            if not _is_due(member, rank, epoch):
                continue
            member.send(Told(rank=rank, status=self._engines[rank].status()))
            told_at = time.monotonic()
            while _is_due(member, rank, epoch) and not is_over():
                if time.monotonic() - max(told_at, member.heard_at) > PATIENCE_S:
                    logs.SERVER.warning(
                        "An API worker has not answered for %.0f s: going on without it",
                        PATIENCE_S,
                    )
                    break
                await asyncio.sleep(_POLL_S)
            if not member.is_alive:
                return


def _is_due(member: Member, rank: int, epoch: int) -> bool:
    return member.is_alive and bool(member.settled) and member.settled[rank] != epoch
