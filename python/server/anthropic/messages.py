"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from trunkline.engine.native_request import RequestOptions, make_request, parse_rid
from trunkline.server.answer import Job, Prepared, generation
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
from trunkline.server.openai.fields import parse_scheduling
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
    received_ts = time.time()
    fields.n = 1  # whatever the server's own defaults say
    context = server.openai
    model = server.check_model(fields.model)
    message_id = f"msg_{rid}"
    rid = message_id if fields.rid is None else parse_rid(fields.rid, context.limits)
    sampling = parse_message_sampling(fields, context)
    priority, namespace, dp_rank = parse_scheduling(fields, context)
    plan = _plan(fields, server)
    options = RequestOptions(
        stream=bool(fields.stream),
        priority=priority,
        namespace=namespace,
        dp_rank=dp_rank,
        received_ts=received_ts,
    )
    prompt = chat_prompt(server, plan, _chat(fields))
    output = plan.for_prompt(prompt.text, sampling, prompt.continued)
    engine_request = make_request(context, rid, prompt.ids, output.sampling, options)
    reply_options = MessageOptions(id=message_id, model=model, max_tokens=fields.max_tokens)
    reply = MessageReply(reply_options, output.splitter())
    ignored += without_effect(fields, server.parsers)
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
        variables=template_variables(fields),
        generates=not continues,
        continues=continues,
    )


async def count_tokens(request: Request) -> Response:
    """The number of tokens that a message's prompt would have; it may exceed the context."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    return json_response({"input_tokens": await offload(size, lambda: _count(body, server))})


def _count(body: Any, server: Server) -> int:
    fields, ignored = parse_message_fields(body)
    server.note_ignored(ignored)
    server.check_model(fields.model)
    with client_words(_WORDS):
        return count_chat(server, _plan(fields, server), _chat(fields))
