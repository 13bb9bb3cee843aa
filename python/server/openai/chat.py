"""POST /v1/chat/completions: the request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.chat_template import RESERVED_VARIABLES
from trunkline.engine.messages import LogprobRequest
from trunkline.engine.native_request import (
    RequestContext,
    RequestOptions,
    check_length,
    check_prompt,
    make_request,
    parse_rid,
)
from trunkline.engine.validation import RequestError, is_int, parse_token_ids, shown
from trunkline.server.answer import Generation, Job, Prepared, request_id
from trunkline.server.http import read_json
from trunkline.server.openai.chat_reply import ChatOptions, ChatReply
from trunkline.server.openai.fields import (
    ChoiceFields,
    parse_fields,
    parse_sampling,
    parse_scheduling,
    service_tier,
    wanted_ids,
    wants_usage,
)
from trunkline.server.openai.messages import check_messages
from trunkline.server.state import Server, offload, server_of

MAX_TOP_LOGPROBS: Final = 20
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "thinking": (False,),
    "max_thinking_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "task": (),
    "images_config": ({},),
    "mm_processor_kwargs": ({},),
    "chat_template": (),
    "chat_template_content_format": ("auto",),
    "echo": (False,),
    "add_special_tokens": (False,),
}


# What says how messages become a prompt.
_RENDERING: Final = (
    "messages documents chat_template_kwargs reasoning_effort continue_final_message "
    "add_generation_prompt"
).split()


class ChatFields(ChoiceFields, kw_only=True):
    """The body of a chat completion."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    input_ids: Any = None
    documents: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


async def chat_completions(request: Request) -> ASGIApp:
    """Parse, submit, answer."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    prepared = await offload(size, lambda: prepare_chat(body, server, request_id(request)))
    return Generation(server, prepared)


def prepare_chat(body: Any, server: Server, rid: str) -> Prepared:
    """Validate, render and tokenise the body of a chat completion; `rid` is its id if it has none.

    Raises:
        RequestError: a field is wrong, or the prompt too long.
    """
    received_ts = time.time()
    fields, ignored = parse_fields(body, ChatFields, UNSUPPORTED)
    context = server.openai
    model = server.check_model(fields.model)
    if fields.rid is not None:
        rid = parse_rid(fields.rid, context.limits)
    sampling = parse_sampling(fields, context, fields.longest())
    include_usage, continuous = wants_usage(
        fields, server.config.api.stream_response_default_include_usage
    )
    priority, namespace = parse_scheduling(fields, context)
    prompt_ids = _prompt_ids(fields, server)
    options = RequestOptions(
        stream=bool(fields.stream),
        priority=priority,
        namespace=namespace,
        logprobs=_logprobs(fields, context),
        received_ts=received_ts,
    )
    request = make_request(context, rid, prompt_ids, sampling, options)
    reply = ChatOptions(
        id=rid,
        model=model,
        created=int(received_ts),
        include_usage=include_usage,
        continuous_usage=continuous,
        token_ids=wanted_ids(fields),
        extra=service_tier(fields),
    )
    ignored += _without_effect(fields, server)
    job = Job(rid=rid, requests=[request], stream=options.stream, ignored=ignored)
    return Prepared(job, ChatReply(server, reply))


def _prompt_ids(fields: ChatFields, server: Server) -> list[int]:
    limits = server.openai.limits
    if fields.input_ids is not None:
        ids = parse_token_ids(fields.input_ids, "input_ids", limits, most=2**31)
        check_prompt(ids, "input_ids", limits)
        return ids
    continues = bool(fields.continue_final_message)
    generates = fields.add_generation_prompt
    variables = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    if fields.documents and not server.chat_template.reads("documents"):
        raise RequestError(
            "documents are not supported by this model: its chat template does not read them; put "
            "them into a message.",
            "documents",
        )
    return chat_prompt_ids(
        server,
        fields.messages,
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        variables=variables,
        documents=fields.documents,
    )


def chat_prompt_ids(
    server: Server,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
    documents: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The token ids of a chat's prompt.

    Raises:
        RequestError: a message is malformed, the template refuses the chat, or it is too long.
    """
    limits = server.openai.limits
    text = render_chat(
        server,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        documents=documents,
    )
    check_length(text, "messages", server.tokenizer, limits)
    [prompt_ids] = server.tokenizer.encode_batch([text], add_special_tokens=False)
    check_prompt(prompt_ids, "messages", limits)
    return prompt_ids


def _without_effect(fields: ChatFields, server: Server) -> list[str]:
    """Fields that this model, or this body, leaves without an effect."""
    if fields.input_ids is not None:
        return [name for name in _RENDERING if getattr(fields, name)]
    reads = server.chat_template.reads
    names = [f"chat_template_kwargs.{name}" for name in fields.chat_template_kwargs or {}]
    unread = [name for name in names if not reads(name.partition(".")[2])]
    if fields.reasoning_effort is not None and not reads("reasoning_effort"):
        unread.append("reasoning_effort")
    return unread


def render_chat(
    server: Server,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
    documents: list[dict[str, Any]] | None = None,
) -> str:
    """The prompt of a chat, to be encoded without special tokens.

    Raises:
        RequestError: a message is malformed, or the template refuses the chat (its own words).
    """
    check_messages(messages)
    reserved = RESERVED_VARIABLES & variables.keys()
    if reserved:
        raise RequestError(
            f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}.",
            "chat_template_kwargs",
        )
    try:
        return server.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            **variables,
        )
    except ValueError as error:
        raise RequestError(str(error), "messages") from error


def _logprobs(fields: ChatFields, context: RequestContext) -> LogprobRequest | None:
    top = fields.top_logprobs
    if not fields.logprobs:
        if top is not None and not (is_int(top) and top == 0):
            raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
        return None
    if top is None:
        top = 0
    if not is_int(top) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be an integer in [0, {MAX_TOP_LOGPROBS}], got {shown(top)}.",
            "top_logprobs",
        )
    return LogprobRequest(top_n=top, processed=context.processed_logprobs)
