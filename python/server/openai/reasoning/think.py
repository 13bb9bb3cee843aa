"""Reasoning between tags at the beginning of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trunkline.server.openai.incremental import (
    Parsing,
    ParsingSplitter,
    Source,
    accept,
    skip_space,
    until,
)
from trunkline.server.openai.pieces import Content, Piece, Reasoning


@dataclass(frozen=True, slots=True)
class Tags:
    """How a model marks its reasoning."""

    begin: str
    end: str

    def left_open(self, text: str) -> bool:
        """Whether a prompt ends inside reasoning: its template opened it."""
        return text.rstrip().endswith(self.begin)

    def within(self, text: str) -> bool:
        """Whether a text that a model is to go on with ends inside reasoning."""
        return text.rfind(self.begin) > text.rfind(self.end)


class ThinkSplitter:
    """Takes the reasoning of one sample apart; what follows it is content. A `Splitter`.

    Output that does not begin with the tag is an answer, unless the prompt had opened it. White
    space around the reasoning is dropped.

    Args:
        tags: how the reasoning is marked.
        is_open: the prompt ends inside reasoning.
        verbatim: tags and white space stay part of the reasoning.
        interrupts: what ends reasoning too, and belongs to the answer.
    """

    def __init__(
        self,
        tags: Tags,
        *,
        is_open: bool,
        verbatim: bool = False,
        interrupts: tuple[str, ...] = (),
    ) -> None:
        self._tags = tags
        self._is_open = is_open
        self._verbatim = verbatim
        self._interrupts = interrupts
        self._space = ""
        self._started = False
        self._splitter = ParsingSplitter(self._parse)

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain once `text` follows what was fed before."""
        return self._splitter.feed(text)

    def end(self) -> list[Piece]:
        """What was held back, when nothing more will come."""
        return self._splitter.end()

    def _parse(self, source: Source) -> Parsing[None]:
        source.record()
        yield from skip_space(source)
        opened = yield from accept(source, self._tags.begin)
        before = source.recorded()
        if opened or self._is_open:
            yield from self._reasoning(before if self._verbatim else "")
            ends = (self._tags.end, *self._interrupts)
            end = yield from until(source, ends, self._reasoning, consume=False)
            if end == self._tags.end:
                yield from self._end(source)
        elif before:
            yield Content(before)
        yield from until(source, (), _content)

    def _end(self, source: Source) -> Parsing[None]:
        tag = source.take(len(self._tags.end))
        space = yield from skip_space(source)
        if self._verbatim:
            yield from self._reasoning(tag + space)

    def _reasoning(self, text: str) -> Iterator[Piece]:
        if self._verbatim:
            if text:
                yield Reasoning(text)
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        kept = kept if self._started else kept.lstrip()
        if kept:
            self._started = True
            yield Reasoning(kept)


def _content(text: str) -> Iterator[Piece]:
    if text:
        yield Content(text)
