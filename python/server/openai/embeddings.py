"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.body_fields import SchedulingFields
from trunkline.engine.client import Stream
from trunkline.engine.embeddings import check_size, embedding, parse_dimensions, pooled_request
from trunkline.engine.outputs import unanswered
from trunkline.engine.prompts import row_ids
from trunkline.server.answer import Job, Prepared, WholeReply, generation
from trunkline.server.openai import rows
from trunkline.server.openai.fields import parse_envelope, parse_fields
from trunkline.server.openai.inputs import parse_inputs
from trunkline.server.state import Server

UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "messages": (),
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}


class EmbeddingFields(SchedulingFields, kw_only=True):
    """What is to be embedded, and how the vectors are written."""

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Any = None


async def embeddings(request: Request) -> ASGIApp:
    """Embed texts or token ids: one vector of length 1 for each."""
    return await generation(request, prepare_embedding)


def prepare_embedding(body: Any, server: Server, rid: str) -> Prepared:
    """Validate and tokenise the body of an embedding request; `rid` is its id if it has none.

    Raises:
        RequestError: a field is wrong, or an input too long.
    """
    fields, ignored = parse_fields(body, EmbeddingFields, UNSUPPORTED)
    context, envelope = server.openai, parse_envelope(fields, server, rid)
    dimensions = parse_dimensions(fields.dimensions, context.limits)
    prompts, _ = parse_inputs(fields.input, "input", context, new_tokens=0)
    check_size(prompts, "input", context.limits)
    requests = [
        pooled_request(row_id, prompt, envelope.options)
        for row_id, prompt in zip(row_ids(envelope.rid, len(prompts)), prompts, strict=True)
    ]

    def write(streams: Sequence[Stream]) -> object:
        as_base64 = fields.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _written(stream, dimensions, as_base64=as_base64),
            }
            for index, stream in enumerate(streams)
        ]
        usage = rows.prompt_usage(streams)
        return {"object": "list", "data": data, "model": envelope.model, "usage": usage}

    job = Job(rid=envelope.rid, requests=requests, stream=False, ignored=ignored)
    return Prepared(job, WholeReply(write))


def _written(stream: Stream, dimensions: int | None, *, as_base64: bool) -> list[float] | str:
    [sample] = stream.samples
    vector = embedding(sample, dimensions)
    if vector is None:
        raise unanswered(sample)
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values
