"""/v1/responses: create, retrieve, cancel, delete, and the items that a response was made from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.engine.native_request import make_request
from trunkline.engine.validation import RequestError
from trunkline.server.answer import (
    EVENT_HEADERS,
    Generation,
    Job,
    Prepared,
    ignored_headers,
    request_id,
)
from trunkline.server.http import json_response, read_json
from trunkline.server.openai import background
from trunkline.server.openai.event_log import EventLog
from trunkline.server.openai.fields import parse_envelope, parse_fields, parse_sampling
from trunkline.server.openai.output import OutputPlan, Wishes, plan_output
from trunkline.server.openai.prompt import Conversation, count_chat, unread_variables
from trunkline.server.openai.responses_fields import (
    UNSUPPORTED,
    ResponseFields,
    check_fields,
    echoed_fields,
    template_variables,
    wanted_logprobs,
)
from trunkline.server.openai.responses_input import Item, chat_messages, parse_input
from trunkline.server.openai.responses_reply import ResponseOptions, ResponseReply
from trunkline.server.openai.responses_store import StoredResponse
from trunkline.server.openai.responses_tools import TOOL_KEYS, chat_tool_choice, chat_tools
from trunkline.server.openai.translation import chat_format, client_words, unread_keys
from trunkline.server.openai.truncation import fitting_prompt
from trunkline.server.pinning import pinned
from trunkline.server.state import Server, offload, server_of

PAGE: Final = (1, 100, 20)  # least, most and default items of a page
_LONG_BYTES: Final = 1 << 20  # a conversation that is taken up again counts as a long body
_WORDS: Final = {
    "messages": "input",
    r"response_format(\.json_schema)?": "text.format",
    r"(tools\[\d+\])\.function": r"\1",
}


async def create_response(request: Request) -> ASGIApp:
    """Parse, submit, answer; a background response is answered before it has begun."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    rid = request_id(request)
    prepared = await offload(_work_bytes(body, size), lambda: prepare_response(body, server, rid))
    reply = prepared.reply
    assert isinstance(reply, ResponseReply)
    if not reply.is_background:
        return _Foreground(server, prepared, reply)
    server.note_ignored(prepared.job.ignored)
    headers = ignored_headers(prepared.job.ignored)
    requests = pinned(prepared.job.requests, request.scope, server.native.dp_size)
    events = await background.start(server, replace(prepared.job, requests=requests), reply)
    if prepared.job.stream:
        return _followed(events, 0, headers)
    return json_response(reply.snapshot(), headers=headers)


def _followed(events: EventLog, first: int, headers: Mapping[str, str]) -> Response:
    """The events of a background response from number `first`; whoever leaves ends nothing."""
    fixed = {name.decode(): value.decode() for name, value in EVENT_HEADERS}
    return StreamingResponse(events.follow(first), headers={**fixed, **headers})


def _work_bytes(body: Any, size: int) -> int:
    """What a body of `size` bytes counts for when its work is planned."""
    goes_on = isinstance(body, dict) and body.get("previous_response_id") is not None
    return size + (_LONG_BYTES if goes_on else 0)


class _Foreground:
    """A generation whose response must not stay unfinished in the store when the client leaves."""

    def __init__(self, server: Server, prepared: Prepared, reply: ResponseReply) -> None:
        self._generation = Generation(server, prepared)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._generation(scope, receive, send)
        finally:
            self._reply.leave()


def prepare_response(body: Any, server: Server, rid: str) -> Prepared:
    """Validate, render and tokenise the body of a response; its id is made from `rid`, a fresh one.

    Raises:
        RequestError: a field is wrong, something it refers to is gone, or the prompt is too long.
    """
    fields, ignored = _fields(body, server)
    with client_words(_WORDS):
        return _prepare(fields, ignored, server, rid)


def _prepare(fields: ResponseFields, ignored: list[str], server: Server, rid: str) -> Prepared:
    fields.n = 1  # whatever the server's own defaults say
    context = server.openai
    response_id = f"resp_{rid}"
    envelope = parse_envelope(
        fields,
        server,
        response_id,
        stream=bool(fields.stream),
        logprobs=wanted_logprobs(fields, processed=context.processed_logprobs),
    )
    sampling = parse_sampling(fields, context, ("max_output_tokens", fields.max_output_tokens))
    plan = _plan(fields, server)
    is_stored = _is_stored(fields, server)
    items, messages = _conversation(fields, server)
    prompt = fitting_prompt(
        server,
        plan,
        _chat(fields, messages),
        max_new_tokens=sampling.sampling.max_new_tokens,
        may_drop=fields.truncation == "auto",
    )
    output = plan.for_prompt(prompt.text, sampling)
    rid, options = envelope.rid, envelope.options
    engine_request = make_request(context, rid, prompt.ids, output.sampling, options)
    reply_options = ResponseOptions(
        id=response_id,
        created_at=int(options.received_ts),
        echoed=echoed_fields(fields, envelope.model, sampling, is_stored),
        input_items=items,
    )
    reply = ResponseReply(server, reply_options, output.splitter())
    job = Job(rid=rid, requests=[engine_request], stream=options.stream, ignored=ignored)
    return Prepared(job, reply, reply)


def _fields(body: Any, server: Server) -> tuple[ResponseFields, list[str]]:
    """The typed body, checked, and the names of what has no effect."""
    fields, ignored = parse_fields(body, ResponseFields, UNSUPPORTED)
    check_fields(fields)
    if fields.text is not None:
        fields.response_format = chat_format(fields.text.format)
    ignored += unread_variables(server, template_variables(fields))
    return fields, ignored + unread_keys(fields.tools, TOOL_KEYS)


def _conversation(fields: ResponseFields, server: Server) -> tuple[list[Item], list[Any]]:
    """The items of the input alone, and the chat that they go on with."""
    items = parse_input(fields.input, server.responses.item)
    earlier: list[Item] = []
    if fields.previous_response_id is not None:
        chain = server.responses.chain(fields.previous_response_id)
        earlier = _items_of(chain)
    return items, chat_messages(fields.instructions, [*earlier, *items])


def _items_of(chain: Sequence[StoredResponse]) -> list[Item]:
    return [item for entry in chain for item in (*entry.inputs(), *entry.response()["output"])]


def _plan(fields: ResponseFields, server: Server) -> OutputPlan:
    wishes = Wishes(
        tools=chat_tools(fields.tools),
        tool_choice=chat_tool_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
        max_thinking_tokens=fields.max_thinking_tokens,
    )
    return plan_output(server.parsers, wishes, server.openai.limits)


def _is_stored(fields: ResponseFields, server: Server) -> bool:
    """Whether the response is kept: unless the body or the server says otherwise.

    Raises:
        RequestError: it has to be, but cannot.
    """
    if server.responses.is_on:
        if fields.background and fields.store is False:
            raise RequestError("background needs store to be true.", "store")
        return fields.store is not False
    if fields.store or fields.background:
        raise RequestError(
            "this server stores no responses (--response-store-bytes 0): leave out store and "
            "background.",
            "background" if fields.background else "store",
        )
    return False


async def count_input_tokens(request: Request) -> Response:
    """The number of tokens that a response's prompt would have; it may exceed the context."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    count, ignored = await offload(_work_bytes(body, size), lambda: _count(body, server))
    server.note_ignored(ignored)
    content = {"object": "response.input_tokens", "input_tokens": count}
    return json_response(content, headers=ignored_headers(ignored))


def _count(body: Any, server: Server) -> tuple[int, list[str]]:
    """The number, and the names of what has no effect."""
    fields, ignored = _fields(body, server)
    server.check_model(fields.model)
    with client_words(_WORDS):
        _, messages = _conversation(fields, server)
        return count_chat(server, _plan(fields, server), _chat(fields, messages)), ignored


def _chat(fields: ResponseFields, messages: list[Any]) -> Conversation:
    """What the chat template is to render."""
    variables = {name: value for _, name, value in template_variables(fields)}
    return Conversation(messages=messages, variables=variables)


async def get_response(request: Request) -> Response:
    """A stored response, ended or not; one of a background stream also as its events."""
    entry = _entry(request)
    query = request.query_params
    stream = query.get("stream", "false").lower()
    if stream not in ("true", "false"):
        raise RequestError(f"stream must be true or false, got {stream[:80]!r}.", "stream")
    if stream == "false":
        if "starting_after" in query:
            raise RequestError("starting_after needs stream to be true.", "starting_after")
        return json_response(entry.response())
    if entry.events is None:
        raise RequestError(
            "stream: only a response that was created with both background and stream can be "
            "retrieved as a stream.",
            "stream",
        )
    after = query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise RequestError(
            f"starting_after must be a sequence number, got {after[:80]!r}.", "starting_after"
        )
    return _followed(entry.events, int(after) + 1, {})


async def delete_response(request: Request) -> Response:
    """Forget a response; one that runs is aborted."""
    response_id = request.path_params["response_id"]
    server_of(request).responses.delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Abort a response that runs, and answer with what it has."""
    entry = _entry(request)
    if entry.document is None:
        entry.abort()
        await entry.ended.wait()
    elif not entry.is_background:
        raise RequestError(
            f"the response {entry.id!r} has ended: it cannot be cancelled any more.", "response_id"
        )
    return json_response(entry.response())


async def list_input_items(request: Request) -> Response:
    """The items that a response was made from, those of earlier responses included, by pages."""
    store = server_of(request).responses
    entry = _entry(request)
    chain = [] if entry.previous_id is None else store.chain(entry.previous_id)
    items = [*_items_of(chain), *entry.inputs()]
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f'order must be "asc" or "desc", got {order[:80]!r}.', "order")
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"after: there is no item {after[:80]!r}.", "after")
        items = items[places[0] + 1 :]
    limit = _limit(query.get("limit"))
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _limit(text: str | None) -> int:
    least, most, default = PAGE
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and least <= int(text[:9]) <= most):
        raise RequestError(
            f"limit must be an integer in [{least}, {most}], got {text[:80]!r}.", "limit"
        )
    return int(text)


def _entry(request: Request) -> StoredResponse:
    return server_of(request).responses.get(request.path_params["response_id"])
