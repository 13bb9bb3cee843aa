"""`--log-requests`: two log lines per request, when it comes and when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from trunkline.engine.client import Request, Stream
from trunkline.engine.messages import SamplingParams
from trunkline.engine.outputs import finish_reason
from trunkline.server import logs
from trunkline.server.state import Server

COUNTS, PARAMETERS, EXCERPTS, ALL = range(4)
_EXCERPT_CHARS: Final = 2048
_TEXTS: Final = frozenset(("stop", "stop_regex"))  # of the sampling parameters


class RequestLog:
    """Writes what `--log-requests-level` allows; nothing unless `--log-requests` is on."""

    def __init__(self, server: Server) -> None:
        options = server.config.logs
        self._is_on = options.log_requests
        self._level = options.log_requests_level
        self._tokenizer = server.tokenizer

    def received(self, requests: Sequence[Request]) -> None:
        """A job has come in."""
        if self._is_on:
            for request in requests:
                logs.SERVER.info("Receive: obj=GenerateReqInput(%s)", self._request(request))

    def finished(self, streams: Sequence[Stream]) -> None:
        """A job has ended, in whichever way."""
        if self._is_on:
            for stream in streams:
                out = ", ".join(self._samples(stream))
                logs.SERVER.info(
                    "Finish: obj=GenerateReqInput(%s), out=[%s]", self._request(stream.request), out
                )

    def _request(self, request: Request) -> str:
        fields: dict[str, object] = {
            "rid": request.rid,
            "prompt_tokens": len(request.prompt_ids),
            "n": request.n,
        }
        if self._level >= PARAMETERS:
            fields["sampling_params"] = self._sampling(request.sampling)
        if self._level >= EXCERPTS:
            ids = request.prompt_ids if self._level >= ALL else request.prompt_ids[:_EXCERPT_CHARS]
            fields["text"] = self._cut(self._tokenizer.decode(ids, skip_special_tokens=False))
        return ", ".join(f"{name}={value!r}" for name, value in fields.items())

    def _sampling(self, sampling: SamplingParams) -> dict[str, object]:
        """The parameters; what a client wrote in them is text, and shown where text is."""
        parameters = msgspec.structs.asdict(sampling)
        if self._level < EXCERPTS:
            for name in _TEXTS & parameters.keys():
                parameters[name] = f"{len(parameters[name])} not shown"
        return parameters

    def _samples(self, stream: Stream) -> list[str]:
        rows = []
        for sample in stream.samples:
            row: dict[str, object] = {
                "completion_tokens": len(sample.output_ids),
                "finish_reason": finish_reason(sample.finished),
            }
            if self._level >= EXCERPTS:
                row["text"] = self._cut(sample.text)
            rows.append(repr(row))
        return rows

    def _cut(self, text: str) -> str:
        return text if self._level >= ALL else text[:_EXCERPT_CHARS]
