"""POST and PUT /generate: the native API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp

from trunkline.engine.client import Stream, Update
from trunkline.engine.native_request import GenerateJob, parse_generate
from trunkline.engine.outputs import OutputOptions, generate_output
from trunkline.server.answer import Generation, Job, Prepared, request_id
from trunkline.server.http import read_json
from trunkline.server.state import Server, offload, server_of


async def generate(request: Request) -> ASGIApp:
    """Generate for one prompt or several, by this engine's own fields."""
    server = server_of(request)
    body, size = await read_json(request, server.config.http.max_body_bytes)
    rid = request_id(request)
    parsed = await offload(size, lambda: parse_generate(body, server.native, default_rid=rid))
    job = Job(
        rid=parsed.rid, requests=parsed.requests, stream=parsed.stream, ignored=parsed.ignored
    )
    return Generation(server, Prepared(job, GenerateReply(server, parsed)))


class GenerateReply:
    """Objects of `engine/outputs.py`: one, or a list for a batch or several samples."""

    def __init__(self, server: Server, job: GenerateJob) -> None:
        self._is_list = job.is_batch or job.requests[0].n > 1
        incremental = job.stream and server.config.api.incremental_streaming_output
        self._options = OutputOptions(
            weight_version=server.config.engine.model.weight_version,
            streamed=job.stream,
            incremental=incremental,
            token_text=server.token_texts.text if job.return_text_in_logprobs else None,
            prompt_token_ids=job.return_prompt_token_ids,
        )
        self._first_index = [0]
        for one in job.requests:
            self._first_index.append(self._first_index[-1] + one.n)

    def whole(self, streams: Sequence[Stream]) -> object:
        now = time.time()
        rows = [
            generate_output(stream, sample, now, self._options)
            for stream in streams
            for sample in stream.samples
        ]
        return rows if self._is_list else rows[0]

    def opening(self, streams: Sequence[Stream]) -> list[object]:
        return []

    def events(self, prompt: int, stream: Stream, updates: Iterable[Update]) -> list[object]:
        now = time.time()
        return [
            generate_output(
                stream,
                update.sample,
                now,
                self._options,
                update=update,
                index=self._index(prompt, update.sample.index) if self._is_list else None,
            )
            for update in updates
        ]

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        return []

    def _index(self, prompt: int, sample: int) -> int:
        return self._first_index[prompt] + sample
