"""What the parsers of all tool-call formats share.

A parser finds calls of known tools in a model's text. Its promises, for every format:

* Text that holds no call is content, to the character.
* A call begins as soon as its name is known; its arguments follow while they are written.
* What looks like a call but has no known name, or no arguments that could be an object, is content
  as it was written. Once begun, a call keeps its arguments as the model wrote them, even cut off.
* White space next to a call is dropped; between content before and content after one it stays.
* With `parallel` false, all after the first call is content.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trunkline.server.openai.incremental import (
    Parsing,
    ParsingSplitter,
    Source,
    accept,
    skip_space,
    until,
)
from trunkline.server.openai.pieces import Arguments, Content, Piece, ToolCall
from trunkline.server.openai.tools.json_text import call_head, json_nested, rest_of_call


def new_call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Which calls a parser may find. `schemas` holds each tool's parameters by its name."""

    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool = True
    new_id: Callable[[], str] = field(default=new_call_id)


class CallParser(ABC):
    """Finds the calls in one sample's text. A `Splitter`."""

    # Texts that mark calls: where they are special tokens, the text must be decoded with those.
    markers: ClassVar[tuple[str, ...]] = ()
    # Markers that end reasoning too: models leave the end tag out before a call.
    interrupts_reasoning: ClassVar[tuple[str, ...]] = ()

    # How a call looks, for models whose chat template does not say.
    example: ClassVar[str]

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._count = 0
        self._space = ""
        self._has_content = False
        self._splitter = ParsingSplitter(self._whole)

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain once `text` follows what was fed before."""
        return self._splitter.feed(text)

    def end(self) -> list[Piece]:
        """What was held back, when nothing more will come."""
        return self._splitter.end()

    @abstractmethod
    def _parse(self, source: Source) -> Parsing[None]:
        """Read until a call that must be the last one has ended, or the text has."""

    def _whole(self, source: Source) -> Parsing[None]:
        yield from self._parse(source)
        yield from until(source, (), self._content)
        if self._space and not self._count:
            yield Content(self._space)

    @property
    def _is_full(self) -> bool:
        return self._count > 0 and not self._calls.parallel

    def _knows(self, name: str) -> bool:
        return name in self._calls.schemas

    def _content(self, text: str) -> Iterator[Piece]:
        """Text that is no call."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if self._count and not self._has_content:
            kept = kept.lstrip()
        if kept:
            self._has_content = True
            yield Content(kept)

    def _begin(self, name: str) -> Iterator[Piece]:
        """A call of a known tool begins."""
        self._space = ""
        yield ToolCall(self._count, self._calls.new_id(), name)
        self._count += 1

    def _arguments(self, text: str) -> Iterator[Piece]:
        """More arguments of the call that began last."""
        if text:
            yield Arguments(self._count - 1, text)

    def _json_call(self, source: Source) -> Parsing[bool]:
        """Read a call that is one JSON object with a name and arguments.

        Returns:
            False if it is none: then the source's record is content by now.
        """
        head = yield from call_head(source)
        if head is None or not self._knows(head.name):
            yield from self._content(source.recorded())
            return False
        source.recorded()
        yield from self._begin(head.name)
        if head.early is not None:
            yield from self._arguments(head.early)
        if head.has_arguments and (yield from json_nested(source, self._arguments)):
            yield from rest_of_call(source)
        return True

    def _json_arguments(self, source: Source, name: str) -> Parsing[None]:
        """A call whose arguments, an object, begin where the source stands."""
        source.recorded()
        yield from self._begin(name)
        yield from json_nested(source, self._arguments)


class SectionParser(CallParser):
    """Finds calls that stand in a section, or alone."""

    section_begin: ClassVar[str]
    call_begin: ClassVar[str]

    def _parse(self, source: Source) -> Parsing[None]:
        begins = (self.section_begin, self.call_begin)
        while not self._is_full and (mark := (yield from until(source, begins, self._content))):
            source.record(mark)
            if mark == self.section_begin:
                yield from skip_space(source)
                if not (yield from accept(source, self.call_begin)):
                    yield from self._content(source.recorded())
                    continue
            yield from self._call(source)

    @abstractmethod
    def _call(self, source: Source) -> Parsing[None]:
        """Read a call, after its beginning; what is none is content."""
