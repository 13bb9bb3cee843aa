"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from trunkline.server.http import error_response, json_response
from trunkline.server.state import Server, server_of


async def list_models(request: Request) -> Response:
    """The served model, as a list of one."""
    return json_response({"object": "list", "data": [_card(server_of(request))]})


async def get_model(request: Request) -> Response:
    """One model; its name may hold slashes, encoded or not."""
    server = server_of(request)
    name = request.path_params["name"]
    if name not in ("default", server.model.name):
        served = server.model.name
        message = f"The model {name[:200]!r} does not exist; this server has {served!r}."
        return error_response(message, 404, "model", "model_not_found")
    return json_response(_card(server))


def _card(server: Server) -> dict[str, object]:
    model = server.model
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "trunkline",
        "root": model.path,
        "parent": None,
        "max_model_len": model.context_length,
    }
