"""JSON schemas of what /v1/responses and /v1/messages take and check by code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trunkline.engine.validation import Limits
from trunkline.server.anthropic import fields as anthropic_fields
from trunkline.server.anthropic import history
from trunkline.server.openai import responses, responses_fields, responses_input
from trunkline.server.openapi.fields import request_fields, text_format
from trunkline.server.openapi.tool_fields import message_tools, response_tools
from trunkline.server.openapi.words import Schema, nullable

_TEXT: Final[Schema] = {"type": "string"}
_OBJECT: Final[Schema] = {"type": "object"}

EVENTS_QUERY: Final[Mapping[str, Schema]] = {
    "stream": {"enum": ["true", "false"], "default": "false"},
    "starting_after": {"type": "integer", "minimum": -1, "maximum": 999_999_999},
}
ITEMS_QUERY: Final[Mapping[str, Schema]] = {
    "limit": {
        "type": "integer",
        "minimum": responses.PAGE[0],
        "maximum": responses.PAGE[1],
        "default": responses.PAGE[2],
    },
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string", "description": "The last id of the page before."},
}


def _object(required: list[str], **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": required}


def _text_or(part: Schema) -> Schema:
    return {"anyOf": [_TEXT, {"type": "array", "items": part}]}


def _with_format(options: str) -> Schema:
    """Options of this name, in the document's components, whose `format` code checks."""
    format_ = {"type": "object", "properties": {"format": nullable(text_format())}}
    return {"allOf": [{"$ref": f"#/components/schemas/{options}"}, format_]}


def response_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of a response by name."""
    common = request_fields(limits)
    pairs, key_chars, value_chars = responses_fields.MAX_METADATA
    return {
        **common,
        "input": _input(),
        "include": {"type": "array", "items": {"enum": [*responses_fields.INCLUDABLE]}},
        "max_output_tokens": common["max_new_tokens"],
        "metadata": {
            "type": "object",
            "propertyNames": {"maxLength": key_chars},
            "additionalProperties": {"type": "string", "maxLength": value_chars},
            "maxProperties": pairs,
        },
        "text": _with_format("TextOptions"),
        **response_tools(),
        "truncation": {"enum": ["auto", "disabled"]},
    }


def _input() -> Schema:
    parts = [
        _object(["type", "text"], type={"enum": ["input_text", "output_text", "text"]}, text=_TEXT),
        _object(["type", "refusal"], type={"const": "refusal"}, refusal=_TEXT),
    ]
    content = _text_or({"anyOf": parts})
    message = _object(
        ["role", "content"],
        type={"const": "message"},
        role={"enum": [*responses_input.ROLES]},
        content=content,
    )
    texts = {"anyOf": [{"type": "null"}, {"type": "array", "items": _object(["text"], text=_TEXT)}]}
    reasoning = _object(["type"], type={"const": "reasoning"}, content=texts, summary=texts)
    call = _object(
        ["type", "call_id", "name", "arguments"],
        type={"const": "function_call"},
        call_id=_TEXT,
        name=_TEXT,
        arguments=_TEXT,
    )
    output = _object(
        ["type", "call_id", "output"],
        type={"const": "function_call_output"},
        call_id=_TEXT,
        output=_text_or(parts[0]),
    )
    reference = _object(["id"], type={"const": "item_reference"}, id=_TEXT)
    items = {"anyOf": [message, reasoning, call, output, reference]}
    most = responses_input.MAX_ITEMS
    return {"anyOf": [_TEXT, {"type": "array", "items": items, "maxItems": most}]}


def message_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of a message by name."""
    common = request_fields(limits)
    blocks = {
        "text": _object(["type", "text"], type={"const": "text"}, text=_TEXT),
        "thinking": _object(["type", "thinking"], type={"const": "thinking"}, thinking=_TEXT),
        "redacted_thinking": _object(["type"], type={"const": "redacted_thinking"}),
        "tool_use": _object(
            ["type", "id", "name", "input"],
            type={"const": "tool_use"},
            id=_TEXT,
            name=_TEXT,
            input=_OBJECT,
        ),
    }
    text = _text_or(blocks["text"])
    blocks["tool_result"] = _object(
        ["type", "tool_use_id"],
        type={"const": "tool_result"},
        tool_use_id=_TEXT,
        content={"anyOf": [{"type": "null"}, *text["anyOf"]]},
    )
    messages = [
        _object(
            ["role", "content"],
            role={"const": role},
            content=_text_or({"anyOf": [blocks[kind] for kind in kinds]}),
        )
        for role, kinds in history.BLOCKS.items()
    ]
    thinking = {"enum": [*anthropic_fields.THINKING]}
    budget = nullable(common["max_thinking_tokens"])
    return {
        **common,
        "messages": {"type": "array", "minItems": 1, "items": {"anyOf": messages}},
        "max_tokens": {**common["max_tokens"], "minimum": 1},
        "system": text,
        "stop_sequences": common["stop"],
        "thinking": _object(["type"], type=thinking, budget_tokens=budget),
        "output_config": _with_format("OutputConfig"),
        "output_format": text_format(),
        **message_tools(),
    }
