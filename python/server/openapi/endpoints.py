"""GET /openapi.json and /docs: the same for every server of a version, whatever it serves."""

from __future__ import annotations

from typing import Any, Final, cast

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from trunkline.engine.validation import Limits
from trunkline.server.openapi.document import openapi_document
from trunkline.server.openapi.page import docs_page
from trunkline.server.route import JSON, Route

# Nothing depends on the model that is served: who has no key learns nothing of it here.
_LIMITS: Final = Limits(vocab_size=2**31, context_length=2**31)


async def openapi_json(request: Request) -> Response:
    """The OpenAPI document of this server."""
    return Response(orjson.dumps(_document(request)), media_type=JSON)


async def docs(request: Request) -> Response:
    """The OpenAPI document as a page to read."""
    headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return HTMLResponse(docs_page(_document(request)), headers=headers)


def _document(request: Request) -> dict[str, Any]:
    """The document, made when it is first asked for."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        state.openapi = openapi_document(routes, _LIMITS)
    return cast(dict[str, Any], state.openapi)
