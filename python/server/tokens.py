"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.engine.typed_bodies import convert
from trunkline.engine.validation import RequestError, parse_token_ids, shown
from trunkline.server.answer import ignored_headers
from trunkline.server.http import json_response, read_json
from trunkline.server.openai.output import Wishes, plan_output
from trunkline.server.openai.prompt import Conversation, render_chat, unread_variables
from trunkline.server.state import Server, offload, server_of

Fields = TypeVar("Fields", bound=msgspec.Struct)


# What says how messages become a text, and values that say nothing.
_OF_CHATS: Final[Mapping[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": (None, {}),
    "tools": (None, []),
}


class Tokenize(msgspec.Struct, forbid_unknown_fields=True):
    """A text, texts or a chat: exactly one of `prompt` and `messages`."""

    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    model: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None


class Detokenize(msgspec.Struct, forbid_unknown_fields=True):
    """Token ids, or lists of them."""

    tokens: list[Any]
    model: Any = None
    skip_special_tokens: bool = True


async def tokenize(request: Request) -> Response:
    """Token ids of a text, of several texts, or of a chat."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    fields = _convert(body, Tokenize)
    server.check_model(fields.model)
    tokens = await offload(size, lambda: _tokens(fields, server))
    ignored = _without_effect(fields, server)
    server.note_ignored(ignored)
    many = bool(tokens) and isinstance(tokens[0], list)
    counts = [len(one) for one in tokens] if many else len(tokens)
    limit = server.model.context_length
    content = {"tokens": tokens, "count": counts, "max_model_len": limit}
    return json_response(content, headers=ignored_headers(ignored))


def _without_effect(fields: Tokenize, server: Server) -> list[str]:
    """What a text, or a chat, or the model's template leaves without effect."""
    if fields.messages is not None:
        # The template writes special tokens, where it wants them.
        given = fields.chat_template_kwargs or {}
        variables = [(f"chat_template_kwargs.{name}", name, one) for name, one in given.items()]
        names = ["add_special_tokens"] if fields.add_special_tokens is True else []
        return names + unread_variables(server, variables)
    return [name for name, neutral in _OF_CHATS.items() if getattr(fields, name) not in neutral]


def _tokens(fields: Tokenize, server: Server) -> list[Any]:
    if (fields.prompt is None) == (fields.messages is None):
        got = "neither" if fields.prompt is None else "both"
        raise RequestError(
            f"exactly one of prompt and messages must be given, got {got}.", "prompt"
        )
    if fields.messages is not None:
        chat = Conversation(
            messages=fields.messages,
            variables=fields.chat_template_kwargs or {},
            generates=fields.add_generation_prompt,
            continues=fields.continue_final_message,
        )
        plan = plan_output(server.parsers, Wishes(tools=fields.tools), server.openai.limits)
        text = render_chat(server, plan, chat)
        return server.tokenizer.encode_batch([text], add_special_tokens=False)[0]
    texts = fields.prompt if isinstance(fields.prompt, list) else [fields.prompt]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"prompt must be a string or a list of strings, got {shown(fields.prompt)}.", "prompt"
        )
    try:
        tokens = server.tokenizer.encode_batch(texts, fields.add_special_tokens is not False)
    except ValueError as error:
        raise RequestError(str(error), "prompt") from error
    return tokens if isinstance(fields.prompt, list) else tokens[0]


async def detokenize(request: Request) -> Response:
    """The text of token ids, or of several lists of them."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    fields = _convert(body, Detokenize)
    server.check_model(fields.model)
    return json_response({"text": await offload(size, lambda: _text(fields, server))})


def _text(fields: Detokenize, server: Server) -> str | list[str]:
    many = any(isinstance(one, list) for one in fields.tokens)
    rows = fields.tokens if many else [fields.tokens]
    limits = server.openai.limits
    for row, ids in enumerate(rows):
        parse_token_ids(ids, f"tokens[{row}]" if many else "tokens", limits, most=2**31)
    texts = [server.tokenizer.decode(ids, fields.skip_special_tokens) for ids in rows]
    return texts if many else texts[0]


def _convert(body: Any, kind: type[Fields]) -> Fields:
    if isinstance(body, dict):  # null is the default, as everywhere
        body = {name: value for name, value in body.items() if value is not None}
    return convert(body, kind)
