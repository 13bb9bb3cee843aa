"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.messages import LogprobRequest
from trunkline.engine.native_request import RequestContext, make_request
from trunkline.engine.prompts import check_prompt
from trunkline.engine.validation import RequestError, is_int, parse_token_ids, shown
from trunkline.server.answer import Job, Prepared, generation
from trunkline.server.openai.chat_reply import ChatOptions, ChatReply
from trunkline.server.openai.fields import (
    ChoiceFields,
    parse_envelope,
    parse_fields,
    parse_sampling,
    service_tier,
    wanted_ids,
    wants_usage,
)
from trunkline.server.openai.output import OutputPlan, Wishes, plan_output
from trunkline.server.openai.prompt import Conversation, Prompt, chat_prompt, unread_variables
from trunkline.server.state import Server

MAX_TOP_LOGPROBS: Final = 20
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "thinking": (False,),
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


# What says how messages become a prompt, and values that say nothing.
_RENDERING: Final[Mapping[str, tuple[object, ...]]] = {
    "messages": ([],),
    "documents": (None, []),
    "chat_template_kwargs": (None, {}),
    "reasoning_effort": (None,),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}


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
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    max_thinking_tokens: Any = None


async def chat_completions(request: Request) -> ASGIApp:
    """Answer a conversation, as OpenAI's Chat Completions API."""
    return await generation(request, prepare_chat)


def prepare_chat(body: Any, server: Server, rid: str) -> Prepared:
    """Validate, render and tokenise the body of a chat completion; `rid` is its id if it has none.

    Raises:
        RequestError: a field is wrong, or the prompt too long.
    """
    _refuse_functions(body)
    fields, ignored = parse_fields(body, ChatFields, UNSUPPORTED)
    context = server.openai
    envelope = parse_envelope(
        fields, server, rid, stream=bool(fields.stream), logprobs=_logprobs(fields, context)
    )
    sampling = parse_sampling(fields, context, fields.longest())
    include_usage, continuous = wants_usage(
        fields, server.config.api.stream_response_default_include_usage
    )
    plan = plan_output(server.parsers, _wishes(fields), context.limits)
    prompt = _prompt(fields, server, plan)
    output = plan.for_prompt(prompt.text, sampling, prompt.continued)
    rid, options = envelope.rid, envelope.options
    request = make_request(context, rid, prompt.ids, output.sampling, options)
    reply = ChatOptions(
        id=rid,
        model=envelope.model,
        created=int(options.received_ts),
        include_usage=include_usage,
        continuous_usage=continuous,
        token_ids=wanted_ids(fields),
        extra=service_tier(fields),
        splitters=[output.splitter() for _ in range(sampling.n)],
    )
    ignored += _without_effect(fields, server)
    job = Job(rid=rid, requests=[request], stream=options.stream, ignored=ignored)
    return Prepared(job, ChatReply(server, reply))


def _refuse_functions(body: Any) -> None:
    """Refuse what tools have replaced, by its remedy."""
    if not isinstance(body, dict):
        return
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(name) not in (None, *UNSUPPORTED[name]):
            raise RequestError(f"{name} is not supported: use {instead}.", name)


def _wishes(fields: ChatFields) -> Wishes:
    return Wishes(
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        parallel_tool_calls=fields.parallel_tool_calls,
        separate_reasoning=fields.separate_reasoning,
        stream_reasoning=fields.stream_reasoning,
        max_thinking_tokens=fields.max_thinking_tokens,
    )


def _prompt(fields: ChatFields, server: Server, plan: OutputPlan) -> Prompt:
    if fields.input_ids is not None:
        limits = server.openai.limits
        ids = parse_token_ids(fields.input_ids, "input_ids", limits, most=2**31)
        check_prompt(ids, "input_ids", limits)
        return Prompt(text=server.tokenizer.decode(ids, skip_special_tokens=False), ids=ids)
    continues = bool(fields.continue_final_message)
    generates = fields.add_generation_prompt
    if fields.documents and not server.chat_template.reads("documents"):
        raise RequestError(
            "documents are not supported by this model: its chat template does not read them; put "
            "them into a message.",
            "documents",
        )
    chat = Conversation(
        messages=fields.messages,
        variables={name: value for _, name, value in _variables(fields)},
        documents=fields.documents,
        generates=not continues if generates is None else generates,
        continues=continues,
    )
    return chat_prompt(server, plan, chat)


def _without_effect(fields: ChatFields, server: Server) -> list[str]:
    """Fields that this model, or this body, leaves without an effect."""
    if fields.input_ids is None:
        return unread_variables(server, _variables(fields))
    names = [name for name, neutral in _RENDERING.items() if getattr(fields, name) not in neutral]
    # The model is not told of them, and what it writes is not read for calls.
    return names if server.parsers.tools or not fields.tools else [*names, "tools"]


def _variables(fields: ChatFields) -> list[tuple[str, str, Any]]:
    """Template variables as `unread_variables` takes them."""
    given = fields.chat_template_kwargs or {}
    variables = [(f"chat_template_kwargs.{name}", name, value) for name, value in given.items()]
    if fields.reasoning_effort is not None:
        variables.append(("reasoning_effort", "reasoning_effort", fields.reasoning_effort))
    return variables


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
