"""POST /v1/score and /v1/rerank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.client import Stream
from trunkline.engine.scoring import (
    RerankFields,
    ScoreFields,
    rerank_output,
    rerank_requests,
    score_requests,
    scores,
)
from trunkline.server.answer import Job, Prepared, WholeReply, generation
from trunkline.server.openai import rows
from trunkline.server.openai.fields import parse_envelope, parse_fields
from trunkline.server.state import Server

SCORE_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "return_token_logprobs": (False,),
    "score_extraction_token": (),
}
RERANK_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {"max_tokens_per_doc": ()}


async def score(request: Request) -> ASGIApp:
    """Tell how likely given tokens are to come next, after a query with each of several items."""
    return await generation(request, prepare_score)


async def rerank(request: Request) -> ASGIApp:
    """Put documents in order by how well they answer a query.

    Needs a model that was trained for it: its chat template reads the variable `instruct`.
    """
    return await generation(request, prepare_rerank)


def prepare_score(body: Any, server: Server, rid: str) -> Prepared:
    """Validate and tokenise the body of a score request; `rid` is its id if it has none.

    Raises:
        RequestError: a field is wrong, or an item too long.
    """
    fields, ignored = parse_fields(body, ScoreFields, SCORE_UNSUPPORTED)
    envelope = parse_envelope(fields, server, rid)
    requests, labels = score_requests(fields, server.openai, envelope.rid, envelope.options)

    def write(streams: Sequence[Stream]) -> object:
        return {
            "object": "scoring",
            "model": envelope.model,
            "scores": [scores(stream.samples[0], labels) for stream in streams],
            "usage": rows.prompt_usage(streams),
        }

    return Prepared(
        Job(rid=envelope.rid, requests=requests, stream=False, ignored=ignored), WholeReply(write)
    )


def prepare_rerank(body: Any, server: Server, rid: str) -> Prepared:
    """Validate, render and tokenise the body of a rerank request; `rid` is its id if it has none.

    Raises:
        RequestError: the model is no reranker, a field is wrong, or a document too long.
    """
    fields, ignored = parse_fields(body, RerankFields, RERANK_UNSUPPORTED)
    envelope = parse_envelope(fields, server, rid)
    requests, labels = rerank_requests(
        fields, server.openai, server.chat_template, envelope.rid, envelope.options
    )
    version = server.config.engine.model.weight_version

    def write(streams: Sequence[Stream]) -> object:
        return rerank_output(fields, streams, labels, version)

    return Prepared(
        Job(rid=envelope.rid, requests=requests, stream=False, ignored=ignored), WholeReply(write)
    )
