"""How many of a sample's tokens are reasoning: those up to the mark of its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from trunkline.server.openai.pieces import Content, Piece, Reasoning


class Decode(Protocol):
    """Ids to text."""

    def __call__(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class ReasoningMeter:
    """Counts one sample's reasoning tokens, its marks included.

    Told what the splitter found, it needs to look for the end of the reasoning only once.
    """

    def __init__(self, end_marks: Sequence[str], end_ids: frozenset[int], decode: Decode) -> None:
        """Count up to the first of the marks; `end_ids` are those that are single tokens."""
        self._end_marks = end_marks
        self._end_ids = end_ids
        self._decode = decode
        self._has_reasoning = False
        self._has_ended = False
        self._count: int | None = None

    def see(self, pieces: Sequence[Piece]) -> None:
        """Take note of what the sample has so far."""
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self._has_reasoning = True
            elif self._has_reasoning and not (isinstance(piece, Content) and not piece.text):
                self._has_ended = True

    def tokens(self, ids: Sequence[int]) -> int:
        """How many of the sample's tokens so far are reasoning."""
        if not self._has_reasoning:
            return 0
        if not self._has_ended:
            return len(ids)
        if self._count is None:
            known = next((n for n, one in enumerate(ids, 1) if one in self._end_ids), None)
            self._count = _shortest(ids, self._is_past) if known is None else known
        return self._count

    def _is_past(self, ids: list[int]) -> bool:
        text = self._decode(ids, skip_special_tokens=False)
        return any(mark in text for mark in self._end_marks)


def _shortest(ids: Sequence[int], is_past: Callable[[list[int]], bool]) -> int:
    """The length of the shortest beginning of `ids` that is past; all of them if none is."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if is_past(list(ids[:middle])):
            high = middle
        else:
            low = middle + 1
    return low
