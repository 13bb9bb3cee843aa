"""POST /v1/completions: the request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.messages import LogprobRequest
from trunkline.engine.native_request import (
    RequestContext,
    RequestOptions,
    check_samples,
    make_request,
    parse_rid,
)
from trunkline.engine.validation import RequestError, is_int, shown
from trunkline.server.answer import Job, Prepared, generation
from trunkline.server.openai.completions_reply import CompletionOptions, CompletionReply
from trunkline.server.openai.fields import (
    ChoiceFields,
    parse_fields,
    parse_sampling,
    parse_scheduling,
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
    received_ts = time.time()
    fields, ignored = parse_fields(body, CompletionFields, UNSUPPORTED)
    context = server.openai
    model = server.check_model(fields.model)
    if fields.rid is not None:
        rid = parse_rid(fields.rid, context.limits)
    sampling = parse_sampling(fields, context, fields.longest(), fallback=DEFAULT_MAX_TOKENS)
    include_usage, continuous = wants_usage(
        fields, server.config.api.stream_response_default_include_usage
    )
    priority, namespace, dp_rank = parse_scheduling(fields, context)
    echo = bool(fields.echo)
    options = RequestOptions(
        stream=bool(fields.stream),
        priority=priority,
        namespace=namespace,
        dp_rank=dp_rank,
        logprobs=_logprobs(fields.logprobs, echo, context),
        received_ts=received_ts,
    )
    prompts, texts = parse_inputs(fields.prompt, "prompt", context)
    check_samples(len(prompts) * sampling.n, context.limits)
    rids = [rid] if len(prompts) == 1 else [f"{rid}_{row}" for row in range(len(prompts))]
    requests = [
        make_request(context, row_id, prompt, sampling, options)
        for row_id, prompt in zip(rids, prompts, strict=True)
    ]
    if echo and texts is None:
        texts = [server.tokenizer.decode(prompt) for prompt in prompts]
    reply = CompletionOptions(
        id=rid,
        model=model,
        created=int(received_ts),
        include_usage=include_usage,
        continuous_usage=continuous,
        echoed=texts if echo else None,
        token_ids=wanted_ids(fields),
        extra=service_tier(fields),
    )
    job = Job(rid=rid, requests=requests, stream=options.stream, ignored=ignored)
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
