"""What a misspelt name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LIKENESS: Final = 0.7  # from 0 to 1; at 0.6 guesses are more often wrong than right


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` if one of the known names is like this one, else nothing."""
    close = difflib.get_close_matches(name, list(known), 1, _LIKENESS)
    return f"; did you mean {close[0]}?" if close else ""
