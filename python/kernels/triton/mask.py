"""Grammar masks: bit `id % 32` of word `id / 32` is set where an id is allowed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def allowed(words, ids, inside):
    """Which ids a mask allows.

    Args:
        words: pointer to the int32 words of one mask.
        ids: int32 block.
        inside: which of them the vocabulary has; the others are not allowed.
    """
    word = tl.load(words + (ids >> 5), mask=inside, other=0)
    return ((word >> (ids & 31)) & 1) != 0
