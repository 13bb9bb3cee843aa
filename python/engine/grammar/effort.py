"""How long matching may take: an ambiguous grammar must not stand in the way of other requests.

What a token costs grows with the number of ways to derive the text so far, in such grammars with a
power of its length, and every step waits for it. Times are of the thread: a busy machine costs no
request its answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FREE_S: Final = 0.5
TOKEN_S: Final = 0.005  # usual grammars take less than a hundredth of it
SLOW_S: Final = 0.005  # calls for several sequences that take longer for each are looked into


class Effort:
    """What a request's samples have taken together, against what they may."""

    __slots__ = ("_left_s", "is_exhausted")

    def __init__(self) -> None:
        self._left_s = FREE_S
        self.is_exhausted = False  # once they have taken too long, for good

    def add_token(self) -> None:
        """Each token brings some time with it."""
        self._left_s += TOKEN_S

    @contextmanager
    def charged(self) -> Iterator[None]:
        """What runs inside is for this request alone."""
        started_at = time.thread_time()
        try:
            yield
        finally:
            self._left_s -= time.thread_time() - started_at
            self.is_exhausted |= self._left_s < 0


class Shared:
    """Measures a call for several sequences: was it slow for one of them?"""

    __slots__ = ("_started_at",)

    def __init__(self) -> None:
        self._started_at = time.thread_time()

    def was_slow(self, sequences: int) -> bool:
        """Whether one of so many sequences may have taken long."""
        return time.thread_time() - self._started_at > SLOW_S + 0.1 * SLOW_S * sequences
