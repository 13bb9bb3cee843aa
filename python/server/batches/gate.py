"""How much batch work may be in flight: first come, first served, by weight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Place:
    """Room that a piece of work has in a gate; `leave` may be called again and again."""

    def __init__(self, gate: Gate, weight: int) -> None:
        self._gate = gate
        self._weight = weight

    def leave(self) -> None:
        """Give the room back."""
        weight, self._weight = self._weight, 0
        self._gate.release(weight)


class Gate:
    """Lets work in while its weights fit a limit that may change; at least one piece always runs.

    The limit is looked at when work comes and goes.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.in_flight = 0

    async def enter(self, weight: int) -> Place:
        """Wait for a place, which must be left."""
        await self.acquire(weight)
        return Place(self, weight)

    async def acquire(self, weight: int) -> None:
        """Wait for room, to be given back by `release` with the same weight."""
        if not self._waiting and self._fits(weight):
            self.in_flight += weight
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (weight, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(weight)
            elif entry in self._waiting:  # if not, it was passed over when its turn came
                self._waiting.remove(entry)
                self._admit()
            raise

    def release(self, weight: int) -> None:
        """Give room back."""
        self.in_flight -= weight
        self._admit()

    def _fits(self, weight: int) -> bool:
        return self.in_flight == 0 or self.in_flight + weight <= self._limit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            weight, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.in_flight += weight
                turn.set_result(None)
