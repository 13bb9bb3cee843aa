"""Sampling parameters that say what the output must be -> `GrammarSpec`.

Only shapes are checked here, where requests are parsed; the engine compiles, and refuses what
cannot be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from trunkline.engine.messages import GrammarSpec

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
KINDS: Final[tuple[Kind, ...]] = ("json_schema", "regex", "ebnf", "structural_tag")
_DOCUMENTS: Final = ("json_schema", "structural_tag")  # may come as JSON values, not only as text


class Wrong(NamedTuple):
    """What is wrong with a parameter."""

    name: str
    message: str


def grammar_of(raw: Mapping[str, Any], max_chars: int) -> GrammarSpec | Wrong | None:
    """The grammar that parameters ask for; None if they ask for none."""
    given = [kind for kind in KINDS if raw.get(kind) is not None]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(given)
        return Wrong(given[1], f"only one of {', '.join(KINDS)} may be given, got {names}.")
    return document_grammar(given[0], given[0], raw[given[0]], max_chars)


def document_grammar(kind: Kind, name: str, value: Any, max_chars: int) -> GrammarSpec | Wrong:
    """The grammar of one kind that a field called `name` holds."""
    if kind in _DOCUMENTS and isinstance(value, dict | bool):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return Wrong(name, f"{name} must be a JSON document, not nested too deeply.")
    if not isinstance(value, str):
        words = "a JSON object or its text" if kind in _DOCUMENTS else "a string"
        return Wrong(name, f"{name} must be {words}.")
    if len(value) > max_chars:
        return Wrong(name, f"{name} must have at most {max_chars} characters, got {len(value)}.")
    if not value.isascii() and not _is_unicode(value):
        return Wrong(name, f"{name} holds a lone surrogate: it is not valid Unicode.")
    return GrammarSpec(kind, value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
