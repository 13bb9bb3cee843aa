"""What a sample's text is made of for a client: content, reasoning and tool calls.

A `Splitter` takes a sample's text as it grows and names its parts; replies turn parts into the
shapes of their API. How the text is cut up must not change the parts, once those of one kind are
joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call number `index` begins; its arguments follow as `Arguments`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments' JSON text of call number `index`."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | ToolCall | Arguments


class Splitter(Protocol):
    """Cuts one sample's text into pieces, incrementally."""

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain once `text` follows what was fed before."""

    def end(self) -> list[Piece]:
        """What was held back, when nothing more will come."""
