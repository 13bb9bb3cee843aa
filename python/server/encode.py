"""POST and PUT /encode: embeddings in the native API."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.client import Stream
from trunkline.engine.embeddings import encode_output, parse_encode
from trunkline.server.answer import Generation, Job, Prepared, WholeReply, request_id
from trunkline.server.http import read_json
from trunkline.server.state import offload, server_of


async def encode(request: Request) -> ASGIApp:
    """Embed texts or token ids: one vector of length 1 for each."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    rid = request_id(request)
    parsed = await offload(size, lambda: parse_encode(body, server.native, default_rid=rid))
    version = server.config.engine.model.weight_version

    def write(streams: Sequence[Stream]) -> object:
        now = time.time()
        outputs = [encode_output(one, now, parsed.dimensions, version) for one in streams]
        return outputs if parsed.is_batch else outputs[0]

    job = Job(rid=parsed.rid, requests=parsed.requests, stream=False, ignored=parsed.ignored)
    return Generation(server, Prepared(job, WholeReply(write)))
