"""JSON schemas of tools, of which are called, and of formats, in the shapes of each API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.server.openai.tools.choice import MAX_TOOLS, TOOL_MODES, TOOL_NAME
from trunkline.server.openapi.words import Schema, list_of, object_of

_NAME: Final[Schema] = {"name": {"type": "string", "pattern": TOOL_NAME}}
_FUNCTION: Final[Schema] = {"type": {"const": "function"}}
_MODE: Final[Schema] = {"mode": {"enum": ["auto", "required"]}}
_SCHEMA: Final[Schema] = {"type": "object"}
_STRICT: Final[Schema] = {"description": {"type": "string"}, "strict": {"type": "boolean"}}


def chat_tools() -> Mapping[str, Schema]:
    """Those of chat completions."""
    function = object_of(_NAME, {**_STRICT, "parameters": _SCHEMA})
    entry = object_of({**_FUNCTION, "function": object_of(_NAME)})
    allowed = object_of({**_MODE, "tools": list_of(entry, minItems=1)})
    choice = object_of({"type": {"const": "allowed_tools"}, "allowed_tools": allowed})
    return {
        "tools": list_of(object_of({**_FUNCTION, "function": function}), maxItems=MAX_TOOLS),
        "tool_choice": {"anyOf": [{"enum": [*TOOL_MODES]}, entry, choice]},
    }


def response_tools() -> Mapping[str, Schema]:
    """Those of responses."""
    tool = object_of({**_FUNCTION, **_NAME}, {**_STRICT, "parameters": _SCHEMA})
    entry = object_of({**_FUNCTION, **_NAME})
    kind: Schema = {"type": {"const": "allowed_tools"}}
    choice = object_of({**kind, **_MODE, "tools": list_of(entry, minItems=1)})
    return {
        "tools": list_of(tool, maxItems=MAX_TOOLS),
        "tool_choice": {"anyOf": [{"enum": [*TOOL_MODES]}, entry, choice]},
    }


def message_tools() -> Mapping[str, Schema]:
    """Those of messages."""
    tool = object_of({**_NAME, "input_schema": _SCHEMA}, {**_STRICT, "type": {"const": "custom"}})
    one_call: Schema = {"disable_parallel_tool_use": {"type": "boolean"}}
    kinds = object_of({"type": {"enum": ["auto", "any", "none"]}}, one_call)
    named = object_of({"type": {"const": "tool"}, **_NAME}, one_call)
    return {
        "tools": list_of(tool, maxItems=MAX_TOOLS),
        "tool_choice": {"anyOf": [kinds, named]},
    }
