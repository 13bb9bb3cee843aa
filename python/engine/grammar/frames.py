"""Messages over pipes: eight bytes of length, then the message."""

from __future__ import annotations

import os
import struct
from typing import Final

_HEADER: Final = struct.Struct("<Q")


def frame(message: bytes) -> bytes:
    """A message with its length before it."""
    return _HEADER.pack(len(message)) + message


class FrameReader:
    """Puts together what comes in pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def read(self, descriptor: int) -> bool:
        """Wait for bytes and keep them; False at the end."""
        chunk = os.read(descriptor, 1 << 20)
        self._pending += chunk
        return bool(chunk)

    def take(self) -> list[bytes]:
        """The messages that are complete; each is returned once."""
        messages = []
        start = 0
        while len(self._pending) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._pending, start)
            end = start + _HEADER.size + length
            if end > len(self._pending):
                break
            messages.append(bytes(self._pending[start + _HEADER.size : end]))
            start = end
        del self._pending[:start]
        return messages
