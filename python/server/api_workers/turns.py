"""In which order HTTP processes come back to an engine that was started again.

One after another: while one of them tries a suspect alone (`engine/recovery.py`), nothing of the
others may be in the engine, or they would take the suspect's guilt upon them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from trunkline.engine.channel import Channel
from trunkline.engine.client import Client
from trunkline.engine.fleet import Fleet
from trunkline.server.api_workers.orders import Told

_POLL_S: Final = 0.02


class Member(Protocol):
    """An API worker. `settled` has the epoch of each rank for which it has said so."""

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
        engines: Sequence[Channel],
        client: Client | Fleet,
        members: Callable[[], Collection[Member]],
    ) -> None:
        """Prepare; `client` is the first process's own, of the same engines."""
        self._engines = engines
        self._client = client
        self._members = members
        self._locks = [asyncio.Lock() for _ in engines]

    async def take(self, rank: int) -> None:
        """Tell all members, in turn, that an engine is ready; return when all have settled."""
        engine = self._engines[rank]
        epoch = engine.status().epoch

        def is_over() -> bool:
            status = engine.status()
            return status.epoch != epoch or status.state != "ready"

        async with self._locks[rank]:
            while self._client.replicas[rank].is_testing and not is_over():
                await asyncio.sleep(_POLL_S)
            for member in list(self._members()):
                if is_over():
                    return
                if _is_due(member, rank, epoch):
                    member.send(Told(rank=rank, status=engine.status()))
                while _is_due(member, rank, epoch) and not is_over():
                    await asyncio.sleep(_POLL_S)


def _is_due(member: Member, rank: int, epoch: int) -> bool:
    return member.is_alive and bool(member.settled) and member.settled[rank] != epoch
