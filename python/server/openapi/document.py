"""The OpenAPI 3.1 document of a table of routes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, Final

from trunkline.engine.validation import Limits
from trunkline.server.openapi.schemas import Schemas
from trunkline.server.openapi.words import Schema
from trunkline.server.route import JSON, Gives, Route, Takes

EVENTS: Final = "text/event-stream"
_ABOUT: Final = (
    "The OpenAI API and a native one, for one model. Fields fall in three classes: supported; "
    "accepted without effect; and known but not supported, which may only be null or neutral. "
    "Unknown top-level fields are accepted and named in the response header `x-ignored-fields`. An "
    "explicit null means the default."
)
_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_ERRORS: Final[Mapping[int, str]] = {
    400: "The request cannot be served: the message names field, value and limit.",
    401: "No API key, or a wrong one.",
    403: "The admin key is needed.",
    404: "There is no such thing, or no such model.",
    413: "The body is too large.",
    500: "The request failed in the server.",
    503: "Not now: loading, shutting down, queue full, or engine lost. `retry-after` says when.",
}


def openapi_document(routes: Iterable[Route], limits: Limits) -> dict[str, Any]:
    """Describe `routes`; of `limits` only those that do not depend on the model are told.

    Raises:
        ValueError: a route has no description of its answer.
    """
    schemas = Schemas(limits)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        methods = sorted((route.methods or set()) - {"HEAD"})
        for method in methods:
            operation = _operation(route, method, schemas)
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Trunkline",
            "version": metadata.version("trunkline"),
            "description": _ABOUT,
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.named.items())),
            "securitySchemes": _SECURITY,
        },
    }


def _operation(route: Route, method: str, schemas: Schemas) -> dict[str, Any]:
    description = route.description
    if description.gives is None:
        raise ValueError(f"the route {route.path} does not say what it gives")
    summary, _, rest = inspect.cleandoc(route.endpoint.__doc__ or "").partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": _identifier(route.path, method),
        "tags": [_tag(route)],
        "summary": " ".join(summary.split()),
        "parameters": _parameters(route),
        "responses": _responses(route, description.gives, schemas),
        "security": [] if route.access == "public" else [{}, *({one: []} for one in _SECURITY)],
        "x-access": route.access,
    }
    if rest:
        operation["description"] = " ".join(rest.split())
    if description.takes is not None:
        operation["requestBody"] = _body(description.takes, schemas)
    return operation


def _tag(route: Route) -> str:
    if route.path.startswith("/v1/messages"):
        return "Anthropic's API"
    if route.access == "client" and route.path.startswith("/v1/"):
        return "OpenAI's API"
    return "Native API" if route.description.takes and route.access == "client" else "Operation"


def _identifier(path: str, method: str) -> str:
    words = re.findall(r"\w+", re.sub(r":\w+}", "", path))
    return "_".join([method.lower(), *words])


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.param_convertors
    ]
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)}
        for name, schema in route.description.query.items()
    ]
    return [*in_path, *in_query]


def _body(takes: Takes, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": schemas.of_body(takes)}
    if takes.example is not None:
        content["example"] = takes.example
    return {"required": True, "content": {takes.media_type: content}}


def _responses(route: Route, gives: Gives, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if gives.kind is not None:
        content[gives.media_type] = {"schema": schemas.of(gives.kind)}
    if gives.event is not None:
        content[EVENTS] = {"schema": _events(gives, schemas.of(gives.event))}
    success: dict[str, Any] = {"description": gives.description}
    if content:
        success["content"] = content
    if route.description.takes is not None:
        success["headers"] = {
            "x-ignored-fields": {
                "description": "Fields of the body that nothing here knows.",
                "schema": {"type": "string"},
            }
        }
    responses = {str(gives.status): success}
    error = {JSON: {"schema": schemas.of(route.description.error)}}
    for status, words in _errors(route).items():
        responses[str(status)] = {"description": words, "content": error}
    return responses


def _events(gives: Gives, event: Schema) -> Schema:
    """The schema of one server-sent event, in the form that OpenAPI 3.2 gives to streams."""
    end = (
        "Its name is its type. When something fails after the start, the last tells of the `error`."
        if gives.named_events
        else "The last has [DONE] for its data, or, when something fails after the start, an "
        "object with an `error`."
    )
    return {
        "type": "object",
        "description": f'One event of many, with "stream": true. {end}',
        "properties": {
            "data": {"type": "string", "contentMediaType": JSON, "contentSchema": event}
        },
        "required": ["data"],
    }


def _errors(route: Route) -> dict[int, str]:
    description = route.description
    statuses = {500, 503}
    if description.takes is not None:
        statuses |= {400, 404, 413}
    if description.query:
        statuses.add(400)
    if route.param_convertors:
        statuses.add(404)
    if route.access != "public":
        statuses.add(401)
    if route.access == "admin":
        statuses.add(403)
    chosen = {status: _ERRORS[status] for status in sorted(statuses)}
    return dict(sorted({**chosen, **description.errors}.items()))
