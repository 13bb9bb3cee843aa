"""Between the words of other APIs and those of chat completions, in which answers are planned."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trunkline.engine.validation import RequestError


def chat_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """A format whose fields stand beside its type, as `response_format`: a schema's are nested."""
    if value is None or value.get("type") != "json_schema":
        return value
    return {
        "type": "json_schema",
        "json_schema": {name: one for name, one in value.items() if name != "type"},
    }


def unread_keys(tools: Any, known: frozenset[str]) -> list[str]:
    """Keys of tools that have no effect, named as ignored fields are."""
    if not isinstance(tools, list):
        return []
    keys = {key: None for tool in tools if isinstance(tool, dict) for key in tool}
    return [f"tools.{key}" for key in keys if key not in known]


@contextlib.contextmanager
def client_words(names: Mapping[str, str]) -> Iterator[None]:
    """Errors speak of what the client sent.

    Args:
        names: patterns of field names in the shapes of chat completions, and what the client calls
            such fields; each is applied to what the ones before it made.
    """
    try:
        yield
    except RequestError as error:
        words, param = error.message, error.param or ""
        for pattern, name in names.items():
            if re.match(pattern, param):
                param = re.sub(pattern, name, param, count=1)
                words = re.sub(pattern, name, words, count=1)
        if param == (error.param or ""):
            raise
        raise RequestError(words, param, error.status, error.code) from error
