"""Special tokens in a text that was decoded with them, and their removal while it grows."""

from __future__ import annotations

import re
from collections.abc import Iterable


class SpecialTexts:
    """The texts of a model's special tokens. Immutable."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)

    def without(self, kept: Iterable[str]) -> Stripped:
        """What is to be removed where only `kept` are of interest."""
        return Stripped(self.texts - frozenset(kept))


class Stripped:
    """Texts to remove, prepared for any number of streams."""

    def __init__(self, texts: frozenset[str]) -> None:
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=1) - 1

    def held_back(self, text: str) -> int:
        """How many characters at a text's end may be the beginning of a special token."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class Strip:
    """Removes special tokens from one stream of text."""

    def __init__(self, stripped: Stripped) -> None:
        self._stripped = stripped
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certain, without special tokens."""
        raw = self._held + text
        parts, position = [], 0
        for found in self._stripped.pattern.finditer(raw):
            parts.append(raw[position : found.start()])
            position = found.end()
        certain = len(raw) - self._stripped.held_back(raw[position:])
        self._held = raw[certain:]
        return "".join([*parts, raw[position:certain]])

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held
