"""Parsers that read a text while it grows, written as if they had all of it.

A parser is a generator over a `Source`: it yields pieces as they become certain and `None` where it
must see more text before it can go on. It decides only by what the text is, never by where it was
cut, so any chunking gives the same pieces once those of one kind are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

from trunkline.server.openai.pieces import Piece

Value = TypeVar("Value")
Parsing: TypeAlias = Generator[Piece | None, None, Value]
Emit: TypeAlias = Callable[[str], Iterable[Piece]]


class Source:
    """The text that a parser has not consumed yet, and whether more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._record: list[str] | None = None

    def take(self, count: int) -> str:
        """Consume `count` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def record(self, consumed: str = "") -> None:
        """Remember what is consumed from here on, after what already was."""
        self._record = [consumed]

    def recorded(self) -> str:
        """What was consumed since `record`, which ends with this."""
        text, self._record = "".join(self._record or ()), None
        return text


class ParsingSplitter:
    """A `Splitter` around a parser."""

    def __init__(self, parse: Callable[[Source], Parsing[None]]) -> None:
        self._source = Source()
        self._parser = parse(self._source)

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain once `text` follows what was fed before."""
        self._source.text += text
        return self._run() if text else []

    def end(self) -> list[Piece]:
        """What was held back, when nothing more will come."""
        self._source.ended = True
        return self._run()

    def _run(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._parser:
            if piece is None:
                break
            pieces.append(piece)
        return pieces


def fill(source: Source, count: int) -> Parsing[bool]:
    """Wait for `count` characters; False if the text ends before."""
    while len(source.text) < count:
        if source.ended:
            return False
        yield None
    return True


def starts_with(source: Source, literal: str) -> Parsing[bool]:
    """Whether the text goes on with `literal`; waits only while it may."""
    while not source.text.startswith(literal):
        if source.ended or not literal.startswith(source.text):
            return False
        yield None
    return True


def accept(source: Source, literal: str) -> Parsing[bool]:
    """Consume `literal` if the text goes on with it."""
    found = yield from starts_with(source, literal)
    if found:
        source.take(len(literal))
    return found


def skip_space(source: Source) -> Parsing[str]:
    """Consume white space; returns it."""
    skipped = ""
    while True:
        kept = source.text.lstrip()
        skipped += source.take(len(source.text) - len(kept))
        if kept or source.ended:
            return skipped
        yield None


def until(
    source: Source, markers: Sequence[str], emit: Emit, *, consume: bool = True
) -> Parsing[str | None]:
    """Hand the text on until the first of the markers.

    No marker may contain another one.

    Returns:
        The marker, consumed only if `consume` is set; None when the text ended first.
    """
    while True:
        found = [(source.text.find(marker), marker) for marker in markers]
        position, marker = min((one for one in found if one[0] >= 0), default=(-1, ""))
        if position >= 0:
            yield from emit(source.take(position))
            source.take(len(marker) if consume else 0)
            return marker
        held = 0 if source.ended else held_back(source.text, markers)
        yield from emit(source.take(len(source.text) - held))
        if source.ended:
            return None
        yield None


def held_back(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    most = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), most, -1):
            if text.endswith(marker[:length]):
                most = length
                break
    return most


def text_until(
    source: Source, markers: Sequence[str], *, consume: bool = True
) -> Parsing[tuple[str, str | None]]:
    """The text up to the first of the markers, and which one it was, as `until` finds it."""
    parts: list[str] = []

    def collect(text: str) -> Iterable[Piece]:
        parts.append(text)
        return ()

    marker = yield from until(source, markers, collect, consume=consume)
    return "".join(parts), marker
