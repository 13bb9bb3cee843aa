"""Health, facts, metrics and control: what operators and routers ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from trunkline.engine.client import EngineDied, RequestRefused
from trunkline.engine.client import Request as EngineRequest
from trunkline.engine.config import flat_settings
from trunkline.engine.messages import EngineStatus, SamplingParams
from trunkline.engine.typed_bodies import convert
from trunkline.engine.validation import RequestError, shown
from trunkline.server import logs
from trunkline.server.answer import ignored_headers, request_id
from trunkline.server.http import json_response, read_json
from trunkline.server.metrics import EngineFigures
from trunkline.server.state import Server, server_of

PROBE_TIMEOUT_S: Final = 20.0
_FLUSH_POLL_S: Final = 0.05
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class AbortFields(msgspec.Struct, kw_only=True):
    """What is to end: a request or sample with this id, or all. Neither: nothing."""

    rid: str | None = None
    abort_all: bool | None = None


async def banner(request: Request) -> Response:
    """A sentence for who opens the address in a browser."""
    name = server_of(request).model.name
    return PlainTextResponse(f"Trunkline is serving {name}. The OpenAI API is below /v1.\n")


async def health(request: Request) -> Response:
    """200 while the engine's loop is alive: the answer never waits behind requests."""
    return Response(status_code=200 if server_of(request).unhealthy() is None else 503)


async def health_generate(request: Request) -> Response:
    """200 when the engine makes a token within 20 s."""
    server = server_of(request)
    if server.unhealthy() is not None:
        return Response(status_code=503)
    probe = EngineRequest(
        rid=f"HEALTH_CHECK_{request_id(request)}",
        prompt_ids=[0],
        sampling=SamplingParams(temperature=0.0, max_new_tokens=1),
        stream_interval=0,
        received_ts=time.time(),
    )
    stream = server.client.submit(probe)
    try:
        await asyncio.wait_for(stream.finished(), PROBE_TIMEOUT_S)
    except (TimeoutError, EngineDied, RequestRefused):
        return Response(status_code=503)
    finally:
        stream.abort()
    return Response(status_code=200)


async def model_info(request: Request) -> Response:
    """What is served."""
    server = server_of(request)
    options = server.config.engine.model
    return json_response(
        {
            "model_path": server.model.path,
            "tokenizer_path": server.model.tokenizer_path,
            "is_generation": True,
            "served_model_name": server.model.name,
            "preferred_sampling_params": dict(server.native.defaults) or None,
            "weight_version": options.weight_version,
            "load_format": options.load_format,
            "reasoning_parser": server.parsers.reasoning_name,
            "tool_call_parser": server.parsers.tool_name,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": server.model.model_type,
            "architectures": [server.model.architecture],
        }
    )


async def server_info(request: Request) -> Response:
    """Settings, capacity and figures; secrets are redacted."""
    server = server_of(request)
    facts = server.client.status.facts
    await server.refresh_engine_metrics()
    resolved = dict(facts.settings) if facts else {}
    body: dict[str, Any] = {**flat_settings(server.config), **_known(resolved)}
    body |= {
        "served_model_name": server.model.name,
        "model_path": server.model.path,
        "version": metadata.version("trunkline"),
        "default_sampling_params": {
            "native": dict(server.native.defaults),
            "openai": dict(server.openai.defaults),
        },
        "limits": asdict(server.openai.limits),
    }
    if facts is not None:
        body |= {
            "max_total_num_tokens": facts.max_total_tokens,
            "max_req_input_len": facts.context_length - 1,
            "context_len": facts.context_length,
            "page_size": facts.page_size,
            "device": facts.device,
            "dtype": facts.dtype,
            "startup_time": facts.startup_s,
        }
    body["internal_states"] = [
        _internal_state(replica.status, figures)
        for replica, figures in zip(server.client.replicas, server.metrics.engines, strict=True)
    ]
    return json_response(body)


def _known(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if value is not None}


def _internal_state(status: EngineStatus, figures: EngineFigures) -> dict[str, object]:
    facts = status.facts
    state: dict[str, object] = dict(facts.settings) if facts else {}
    state["dp_rank"] = figures.rank
    state["state"] = status.state
    state["last_gen_throughput"] = figures.values.get("gen_throughput")
    state["engine"] = figures.values
    if facts is not None:
        state["effective_max_running_requests_per_dp"] = facts.max_running_requests
        state["memory_usage"] = {
            "weight": round(facts.weight_bytes / 2**30, 3),
            "kvcache": round(facts.kv_cache_bytes / 2**30, 3),
            "token_capacity": facts.max_total_tokens,
            "graph": 0.0,
        }
    return state


async def flush_cache(request: Request) -> Response:
    """Forget cached prefixes; `?timeout=` waits that many seconds for the engine to be idle."""
    server = server_of(request)
    deadline = time.monotonic() + _timeout(request.query_params.get("timeout"))
    while not await server.client.flush_cache():
        if time.monotonic() >= deadline:
            raise RequestError(
                "Cache not flushed: requests are running or waiting. Try later, or with ?timeout=S "
                "to wait for idleness."
            )
        await asyncio.sleep(_FLUSH_POLL_S)
    logs.SERVER.info("Cache flushed successfully!")
    return PlainTextResponse("Cache flushed.\n")


def _timeout(value: str | None) -> float:
    try:
        seconds = 0.0 if value is None else float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise RequestError(f"timeout must be in [0, 3600] seconds, got {shown(value)}.", "timeout")
    return seconds


async def abort_request(request: Request) -> Response:
    """End a request, one of its samples, or all; 200 also when there is none."""
    server = server_of(request)
    body, _ = await read_json(request, server.config.http.max_body_bytes)
    fields = convert(body, AbortFields)
    ignored = [name for name in body if name not in AbortFields.__struct_fields__]
    if fields.abort_all and fields.rid:
        ignored.append("rid")
    server.note_ignored(ignored)
    if fields.abort_all or fields.rid:
        ended = None if fields.abort_all else fields.rid
        end_requests(server, ended)
        if server.api_workers is not None:
            server.api_workers.abort(ended)
    return Response(status_code=200, headers=ignored_headers(ignored))


def end_requests(server: Server, rid: str | None) -> None:
    """End what came in here with this id, all its parts, and what else an engine has of that name.

    None: all.
    """
    if rid is None:
        server.client.abort(None)
    else:
        for child in server.children.get(rid, [rid]):
            server.client.abort(child)


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    server = server_of(request)
    await server.refresh_engine_metrics()
    return Response(server.metrics.render(), media_type=METRICS_TYPE)
