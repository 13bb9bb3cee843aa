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

    def take(self) -> bytes | None:
        """The next message that is complete; None if there is none."""
        if len(self._pending) < _HEADER.size:
            return None
        end = _HEADER.size + _HEADER.unpack_from(self._pending)[0]
        if len(self._pending) < end:
            return None
        message = bytes(self._pending[_HEADER.size : end])
        del self._pending[:end]
        return message
