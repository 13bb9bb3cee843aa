"""JSON schemas of what /v1/files and /v1/batches take and check by code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.engine.validation import Limits
from trunkline.server.batches import batch_routes, file_routes, upload
from trunkline.server.batches.lines import LINE_KINDS
from trunkline.server.batches.records import ORDERS, PURPOSES
from trunkline.server.openapi.words import Schema

_AFTER: Final[Schema] = {"type": "string", "description": "The last id of the page before."}


def _page(most: int, default: int) -> dict[str, Schema]:
    limit = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return {"limit": limit, "order": {"enum": [*ORDERS], "default": "desc"}, "after": _AFTER}


FILES_QUERY: Final[Mapping[str, Schema]] = {
    **_page(file_routes.DEFAULT_LIMIT, file_routes.DEFAULT_LIMIT),
    "purpose": {"type": "string"},
}
BATCHES_QUERY: Final[Mapping[str, Schema]] = _page(batch_routes.MOST, batch_routes.DEFAULT_LIMIT)


def _seconds() -> Schema:
    low, high = upload.EXPIRY_S
    return {"type": "integer", "minimum": low, "maximum": high}


def file_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of an upload's form by name."""
    return {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": [*PURPOSES], "default": PURPOSES[0]},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": _seconds(),
    }


def batch_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of a new batch by name."""
    pairs, key_chars, value_chars = batch_routes.METADATA
    return {
        "endpoint": {"enum": [*LINE_KINDS]},
        "completion_window": {
            "type": "string",
            "pattern": f"^{batch_routes.WINDOW.pattern}$",
            "description": "A number and one of s, m, h, d, of at most 30d.",
        },
        "metadata": {
            "type": "object",
            "propertyNames": {"maxLength": key_chars},
            "additionalProperties": {"type": "string", "maxLength": value_chars},
            "maxProperties": pairs,
        },
        "output_expires_after": {
            "type": "object",
            "properties": {"anchor": {"const": "created_at"}, "seconds": _seconds()},
            "required": ["anchor", "seconds"],
        },
    }
