"""The events of a stream that goes on without its reader, for readers who come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable


class EventLog:
    """Frames in order, the first with number 0. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()
        self._is_closed = False
        self.num_bytes = 0

    def add(self, frames: Iterable[bytes]) -> None:
        """Append frames; who follows gets them."""
        for frame in frames:
            self._frames.append(frame)
            self.num_bytes += len(frame)
        self._wake()

    def close(self) -> None:
        """Nothing more comes."""
        self._is_closed = True
        self._wake()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """All frames from number `first`, those that are still to come too."""
        while True:
            if first < len(self._frames):
                chunk = b"".join(self._frames[first:])
                first = len(self._frames)
                yield chunk
            elif self._is_closed:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
