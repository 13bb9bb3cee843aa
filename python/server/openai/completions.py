"""POST /v1/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.messages import LogprobRequest
from trunkline.engine.native_request import RequestContext, make_request
from trunkline.engine.prompts import check_samples, row_ids
from trunkline.engine.validation import RequestError, is_int, shown
from trunkline.server.answer import Job, Prepared, generation
from trunkline.server.openai.completions_reply import CompletionOptions, CompletionReply
from trunkline.server.openai.fields import (
    ChoiceFields,
    parse_envelope,
    parse_fields,
    parse_sampling,
    service_tier,
    wanted_ids,
    wants_usage,
)
from trunkline.server.openai.inputs import parse_inputs
from trunkline.server.state import Server

DEFAULT_MAX_TOKENS: Final = 16
MAX_LOGPROBS: Final = 20
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}


class CompletionFields(ChoiceFields, kw_only=True):
    """The body of a completion."""

    prompt: Any
    echo: bool | None = None
    logprobs: Any = None


async def completions(request: Request) -> ASGIApp:
    """Complete one prompt or several, as OpenAI's Completions API."""
    return await generation(request, prepare_completion)


def prepare_completion(body: Any, server: Server, rid: str) -> Prepared:
    """Validate and tokenise the body of a completion; `rid` is its id if it has none.

    Raises:
        RequestError: a field is wrong, or a prompt too long.
    """
    fields, ignored = parse_fields(body, CompletionFields, UNSUPPORTED)
    context, echo = server.openai, bool(fields.echo)
    envelope = parse_envelope(
        fields,
        server,
        rid,
        stream=bool(fields.stream),
        logprobs=_logprobs(fields.logprobs, echo, context),
    )
    sampling = parse_sampling(fields, context, fields.longest(), fallback=DEFAULT_MAX_TOKENS)
    include_usage, continuous = wants_usage(
        fields, server.config.api.stream_response_default_include_usage
    )
    prompts, texts = parse_inputs(fields.prompt, "prompt", context)
    check_samples(len(prompts) * sampling.n, context.limits)
    requests = [
        make_request(context, row_id, prompt, sampling, envelope.options)
        for row_id, prompt in zip(row_ids(envelope.rid, len(prompts)), prompts, strict=True)
    ]
    if echo and texts is None:
        texts = [server.tokenizer.decode(prompt) for prompt in prompts]
    reply = CompletionOptions(
        id=envelope.rid,
        model=envelope.model,
        created=int(envelope.options.received_ts),
        include_usage=include_usage,
        continuous_usage=continuous,
        echoed=texts if echo else None,
        token_ids=wanted_ids(fields),
        extra=service_tier(fields),
    )
    job = Job(rid=envelope.rid, requests=requests, stream=envelope.options.stream, ignored=ignored)
    return Prepared(job, CompletionReply(server, reply))


def _logprobs(value: Any, echo: bool, context: RequestContext) -> LogprobRequest | None:
    if value is None or value is False:
        return None
    if not is_int(value) or not 0 <= value <= MAX_LOGPROBS:
        raise RequestError(
            f"logprobs must be an integer in [0, {MAX_LOGPROBS}], got {shown(value)}.", "logprobs"
        )
    return LogprobRequest(
        prompt_start=0 if echo else None, top_n=value, processed=context.processed_logprobs
    )
