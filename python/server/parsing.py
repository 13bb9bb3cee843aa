"""POST /parse_function_call and /separate_reasoning: the parsers, for texts made elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.engine.typed_bodies import convert
from trunkline.engine.validation import RequestError, shown
from trunkline.server.http import json_response, read_json
from trunkline.server.openai.chat_shapes import whole_message
from trunkline.server.openai.parsers import AUTO
from trunkline.server.openai.reasoning import registry as reasoning_registry
from trunkline.server.openai.reasoning.think import ThinkSplitter
from trunkline.server.openai.tools import registry as tool_registry
from trunkline.server.openai.tools.base import Calls
from trunkline.server.openai.tools.choice import parse_tool_choice
from trunkline.server.openai.tools.gpt_oss import GptOssParser
from trunkline.server.state import Server, offload, server_of


class CallsText(msgspec.Struct, forbid_unknown_fields=True):
    """A model's text, and the tools that it may call. Without a parser the model's own is used."""

    text: str
    tools: Any
    tool_call_parser: str | None = None


class ReasoningText(msgspec.Struct, forbid_unknown_fields=True):
    """A model's text. Without a parser the model's own is used."""

    text: str
    reasoning_parser: str | None = None


async def parse_function_call(request: Request) -> Response:
    """The calls in a text, and the text without them."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    return json_response(await offload(size, lambda: _parse_calls(body, server)))


async def separate_reasoning(request: Request) -> Response:
    """The reasoning in a text, and the rest of it."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    return json_response(await offload(size, lambda: _separate(body, server)))


def _parse_calls(body: Any, server: Server) -> dict[str, Any]:
    fields = convert(body, CallsText)
    choice = parse_tool_choice(fields.tools)
    if choice is None:
        raise RequestError("tools must hold at least one tool.", "tools")
    parser = server.parsers.tools
    if fields.tool_call_parser not in (None, AUTO):
        parser = _chosen(tool_registry.PARSERS, fields.tool_call_parser, "tool_call_parser")
    if parser is None:
        raise RequestError("tool_call_parser must be given: this model has none.")
    splitter = parser(Calls(schemas=choice.schemas))
    message = whole_message([*splitter.feed(fields.text), *splitter.end()])
    calls = [
        {
            "tool_index": index,
            "name": call["function"]["name"],
            "parameters": call["function"]["arguments"],
        }
        for index, call in enumerate(message.get("tool_calls", ()))
    ]
    return {"normal_text": message["content"] or "", "calls": calls}


def _separate(body: Any, server: Server) -> dict[str, Any]:
    fields = convert(body, ReasoningText)
    tags, is_harmony = server.parsers.reasoning, server.parsers.is_harmony
    if fields.reasoning_parser not in (None, AUTO):
        tags = _chosen(reasoning_registry.PARSERS, fields.reasoning_parser, "reasoning_parser")
        is_harmony = tags is None
    if is_harmony:
        calls = GptOssParser(Calls(schemas={}))
        message = whole_message([*calls.feed(fields.text), *calls.end()])
    elif tags is not None:
        # All of the text is here: an end without a beginning means that the prompt had that.
        position = fields.text.find(tags.end)
        is_open = position >= 0 and tags.begin not in fields.text[:position]
        think = ThinkSplitter(tags, is_open=is_open)
        message = whole_message([*think.feed(fields.text), *think.end()])
    else:
        raise RequestError("reasoning_parser must be given: this model has none.")
    return {"reasoning_text": message["reasoning_content"], "text": message["content"]}


def _chosen(known: Any, name: Any, field: str) -> Any:
    if name not in known:
        raise RequestError(f"{field} must be one of {', '.join(known)}, got {shown(name)}.", field)
    return known[name]
