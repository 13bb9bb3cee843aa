"""POST /v1/chat/completions: the request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.chat_template import RESERVED_VARIABLES
from trunkline.engine.messages import LogprobRequest
from trunkline.engine.native_request import (
    RequestOptions,
    check_length,
    check_prompt,
    make_request,
    parse_rid,
)
from trunkline.engine.validation import RequestError, is_int, shown
from trunkline.server.answer import Generation, Job, Prepared, request_id
from trunkline.server.http import read_json
from trunkline.server.openai.chat_reply import ChatOptions, ChatReply
from trunkline.server.openai.fields import (
    CommonFields,
    parse_fields,
    parse_sampling,
    parse_scheduling,
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
    "response_format": ({"type": "text"},),
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
    "input_ids": (),
    "documents": ([],),
    "chat_template": (),
    "best_of": (1,),
}


class ChatFields(CommonFields, kw_only=True):
    """The body of a chat completion."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
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
    limit_name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    sampling = parse_sampling(fields, context, (limit_name, getattr(fields, limit_name)))
    include_usage, continuous = wants_usage(
        fields, server.config.api.stream_response_default_include_usage
    )
    priority, namespace = parse_scheduling(fields, context)
    prompt_ids = _prompt_ids(fields, server)
    options = RequestOptions(
        stream=bool(fields.stream),
        priority=priority,
        namespace=namespace,
        logprobs=_logprobs(fields),
        received_ts=received_ts,
    )
    request = make_request(context, rid, prompt_ids, sampling, options)
    reply = ChatOptions(
        id=rid,
        model=model,
        created=int(received_ts),
        include_usage=include_usage,
        continuous_usage=continuous,
    )
    job = Job(rid=rid, requests=[request], stream=options.stream, ignored=ignored)
    return Prepared(job, ChatReply(server, reply))


def _prompt_ids(fields: ChatFields, server: Server) -> list[int]:
    continues = bool(fields.continue_final_message)
    generates = fields.add_generation_prompt
    variables = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    return chat_prompt_ids(
        server,
        fields.messages,
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        variables=variables,
    )


def chat_prompt_ids(
    server: Server,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> list[int]:
    """The token ids of a chat's prompt.

    Raises:
        RequestError: a message is malformed, the template refuses the chat, or it is too long.
    """
    text = render_chat(
        server,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    check_length(text, "messages", server.tokenizer, server.openai.limits)
    [prompt_ids] = server.tokenizer.encode_batch([text], add_special_tokens=False)
    check_prompt(prompt_ids, "messages", server.openai.limits)
    return prompt_ids


def render_chat(
    server: Server,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
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
            **variables,
        )
    except ValueError as error:
        raise RequestError(str(error), "messages") from error


def _logprobs(fields: ChatFields) -> LogprobRequest | None:
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
    return LogprobRequest(top_n=top)
