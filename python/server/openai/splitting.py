"""One sample's text, from the decoder to pieces: special tokens out, reasoning and calls apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trunkline.server.openai.pieces import Content, Piece, Reasoning, Splitter
from trunkline.server.openai.reasoning.meter import ReasoningMeter
from trunkline.server.openai.special_text import Strip


class OutputSplitter:
    """A `Splitter` made of up to three stages; without any, all text is content.

    Args:
        strip: removes special tokens.
        think: takes reasoning apart; its content goes to `calls`.
        calls: finds calls.
        meter: counts reasoning tokens.
        separate: reasoning is told apart, else it is content.
        hold_reasoning: reasoning comes in one piece when it has ended.
    """

    def __init__(
        self,
        strip: Strip | None = None,
        think: Splitter | None = None,
        calls: Splitter | None = None,
        *,
        meter: ReasoningMeter | None = None,
        separate: bool = True,
        hold_reasoning: bool = False,
    ) -> None:
        self._strip = strip
        self._think = think
        self._calls = calls
        self._meter = meter
        self._separate = separate
        self._hold_reasoning = hold_reasoning
        self._held: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain once `text` follows what was fed before."""
        if self._strip is not None:
            text = self._strip.feed(text)
        return self._named(self._read(text), is_end=False) if text else []

    def end(self) -> list[Piece]:
        """What was held back, when nothing more will come."""
        pieces = self._read(self._strip.end()) if self._strip is not None else []
        if self._think is not None:
            pieces += self._found(self._think.end())
        if self._calls is not None:
            pieces += self._calls.end()
        return self._named(pieces, is_end=True)

    def reasoning_tokens(self, ids: Sequence[int]) -> int:
        """How many of the sample's tokens so far are reasoning, its marks included."""
        return 0 if self._meter is None else self._meter.tokens(ids)

    def _read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [Content(text)] if text else []
        return self._found(pieces if self._think is None else self._think.feed(text))

    def _found(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces, with the calls in their content."""
        if self._calls is None:
            return list(pieces)
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return found

    def _named(self, pieces: list[Piece], *, is_end: bool) -> list[Piece]:
        if self._meter is None:
            return pieces
        self._meter.see(pieces)
        return list(self._delivered(pieces, is_end))

    def _delivered(self, pieces: Iterable[Piece], is_end: bool) -> Iterator[Piece]:
        """The pieces in the way that the client wants its reasoning."""
        for piece in pieces:
            if not isinstance(piece, Reasoning):
                yield from self._release()
                yield piece
            elif not self._separate:
                yield Content(piece.text)
            elif self._hold_reasoning:
                self._held.append(piece.text)
            else:
                yield piece
        if is_end:
            yield from self._release()

    def _release(self) -> Iterator[Piece]:
        if self._held:
            yield Reasoning("".join(self._held))
            self._held.clear()
