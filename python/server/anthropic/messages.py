"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from trunkline.engine.native_request import make_request
from trunkline.server.answer import Job, Prepared, generation, ignored_headers
from trunkline.server.anthropic.fields import (
    MessageFields,
    answer_wishes,
    parse_message_fields,
    parse_message_sampling,
    template_variables,
    without_effect,
)
from trunkline.server.anthropic.history import chat_messages, is_prefill
from trunkline.server.anthropic.reply import MessageOptions, MessageReply
from trunkline.server.http import json_response, read_json
from trunkline.server.openai.fields import parse_envelope
from trunkline.server.openai.output import OutputPlan, plan_output
from trunkline.server.openai.prompt import Conversation, chat_prompt, count_chat
from trunkline.server.openai.translation import client_words
from trunkline.server.state import Server, offload, server_of

_WORDS: Final = {
    "max_thinking_tokens": "thinking.budget_tokens",
    r"response_format(\.json_schema)?": "output_config.format",
    r"(tools\[\d+\])\.function": r"\1",
    r"(tools\[\d+\])\.parameters": r"\1.input_schema",
}


async def create_message(request: Request) -> ASGIApp:
    """Parse, submit, answer."""
    return await generation(request, prepare_message)


def prepare_message(body: Any, server: Server, rid: str) -> Prepared:
    """Validate, render and tokenise the body of a message; its id is made from `rid`, a fresh one.

    Raises:
        RequestError: a field is wrong, or the prompt too long.
    """
    fields, ignored = parse_message_fields(body)
    with client_words(_WORDS):
        return _prepare(fields, ignored, server, rid)


def _prepare(fields: MessageFields, ignored: list[str], server: Server, rid: str) -> Prepared:
    fields.n = 1  # whatever the server's own defaults say
    context = server.openai
    message_id = f"msg_{rid}"
    envelope = parse_envelope(fields, server, message_id, stream=bool(fields.stream))
    rid, options = envelope.rid, envelope.options
    sampling = parse_message_sampling(fields, context)
    plan = _plan(fields, server)
    prompt = chat_prompt(server, plan, _chat(fields))
    output = plan.for_prompt(prompt.text, sampling, prompt.continued)
    engine_request = make_request(context, rid, prompt.ids, output.sampling, options)
    reply_options = MessageOptions(
        id=message_id, model=envelope.model, max_tokens=fields.max_tokens
    )
    reply = MessageReply(reply_options, output.splitter())
    ignored += without_effect(fields, server)
    job = Job(rid=rid, requests=[engine_request], stream=options.stream, ignored=ignored)
    return Prepared(job, reply, reply)


def _plan(fields: MessageFields, server: Server) -> OutputPlan:
    wishes = answer_wishes(fields, server.parsers)
    return plan_output(server.parsers, wishes, server.openai.limits)


def _chat(fields: MessageFields) -> Conversation:
    """What the chat template is to render."""
    messages = chat_messages(fields.system, fields.messages)
    continues = is_prefill(messages)
    return Conversation(
        messages=messages,
        variables={name: value for _, name, value in template_variables(fields)},
        generates=not continues,
        continues=continues,
    )


async def count_tokens(request: Request) -> Response:
    """The number of tokens that a message's prompt would have; it may exceed the context."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    count, ignored = await offload(size, lambda: _count(body, server))
    server.note_ignored(ignored)
    return json_response({"input_tokens": count}, headers=ignored_headers(ignored))


def _count(body: Any, server: Server) -> tuple[int, list[str]]:
    """The number, and the names of what has no effect."""
    fields, ignored = parse_message_fields(body)
    server.check_model(fields.model)
    with client_words(_WORDS):
        count = count_chat(server, _plan(fields, server), _chat(fields))
    return count, ignored + without_effect(fields, server)
