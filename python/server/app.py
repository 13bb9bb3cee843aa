"""The ASGI application: which path leads to which handler, and what stands around them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trunkline.engine.client import Client
from trunkline.engine.fleet import Fleet
from trunkline.engine.native_request import RequestContext
from trunkline.engine.suggestions import did_you_mean
from trunkline.engine.validation import Limits, usable_defaults
from trunkline.server.answer import IGNORED_HEADER
from trunkline.server.anthropic.errors import AnthropicEdge
from trunkline.server.batches.service import Batches, storage_failure
from trunkline.server.config import ServerConfig
from trunkline.server.errors import FAILURES, Failure
from trunkline.server.http import error_response, failure_response
from trunkline.server.keys import Keys
from trunkline.server.load import HEADER, LoadHeader
from trunkline.server.metrics import Metrics
from trunkline.server.middleware import Edge, Guard
from trunkline.server.openai.parsers import Parsers
from trunkline.server.openai.responses_store import ResponseStore
from trunkline.server.preferred_sampling import preferred_sampling
from trunkline.server.routes import ROUTES
from trunkline.server.state import ChatTemplate, ServedModel, Server
from trunkline.server.token_text import Tokenizer, TokenTexts


def create_app(
    client: Client | Fleet,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    config: ServerConfig,
    model: ServedModel,
    model_sampling: Mapping[str, Any],
) -> Starlette:
    """Build the application.

    Its state is at `app.state.server`. The client must be started and closed by the caller, and so
    must the state's `batches`.

    Args:
        client: the engine's client, or that of several, living in the loop that runs the app.
        tokenizer: the model's.
        chat_template: the model's, or the one that was given instead.
        config: all settings.
        model: what is served.
        model_sampling: sampling parameters that the model recommends.

    Raises:
        RequestError: `preferred_sampling_params` is not valid.
    """
    limits = Limits(
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        hidden_size=model.hidden_size,
    )
    preferred = preferred_sampling(config.api.preferred_sampling_params, limits)
    by_model = config.api.sampling_defaults == "model"
    recommended = usable_defaults(model_sampling, limits) if by_model else {}
    num_engines = len(client.replicas)
    metrics = Metrics(
        model.name, sglang_names=config.api.metrics_sglang_names, num_engines=num_engines
    )
    native = replace(
        RequestContext.of(config.engine.scheduler, tokenizer, limits, preferred),
        dp_size=num_engines,
    )
    server = Server(
        client=client,
        tokenizer=tokenizer,
        chat_template=chat_template,
        config=config,
        model=model,
        native=native,
        openai=replace(native, defaults=recommended | preferred),
        metrics=metrics,
        token_texts=TokenTexts(tokenizer),
        responses=ResponseStore(config.api.response_store_bytes),
        parsers=Parsers.of(
            config.api.tool_call_parser,
            config.api.reasoning_parser,
            chat_template,
            tokenizer,
        ),
    )
    server.batches = Batches(server, config.batches)
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(AnthropicEdge),
            Middleware(
                Edge,
                metrics=metrics,
                routes=ROUTES,
                load=LoadHeader(client, metrics.engines).value if config.api.load_header else None,
            ),
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.http.allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", IGNORED_HEADER, HEADER.decode()],
            ),
            Middleware(
                Guard,
                keys=Keys(config.http.api_key, config.http.admin_api_key),
                is_draining=lambda: server.draining,
            ),
        ],
        exception_handlers=_exception_handlers(),
    )
    app.state.server = server
    return app


def _exception_handlers() -> dict[Any, Callable[[Request, Any], Any]]:
    return {
        HTTPException: _http_exception,
        ClientDisconnect: _gone,
        sqlite3.OperationalError: storage_failure,
        **dict.fromkeys(FAILURES, _failure),
    }


async def _failure(_: Request, failure: Failure) -> Response:
    return failure_response(failure)


async def _http_exception(request: Request, error: HTTPException) -> Response:
    path, message, headers = request.scope["path"], error.detail, dict(error.headers or {})
    shown = request.url.path[:200]
    if error.status_code == 404:
        paths = [route.path for route in ROUTES if "{" not in route.path]
        message = f"there is no {shown}{did_you_mean(shown, paths)}"
    elif error.status_code == 405:
        methods = [
            method
            for route in ROUTES
            if route.path_regex.match(path)
            for method in sorted(route.methods or ())
        ]
        headers["Allow"] = ", ".join(methods)
        allowed = " or ".join(method for method in methods if method != "HEAD")
        message = f"{shown} takes {allowed}, not {request.method[:20]}"
    response = error_response(message, error.status_code)
    response.headers.update(headers)
    return response


async def _gone(_: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)
