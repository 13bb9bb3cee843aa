"""Loggers of the server, and its access lines."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from trunkline.engine import log_lines

SERVER = logging.getLogger("trunkline.server")
ACCESS = logging.getLogger("trunkline.access")
HYPERCORN = logging.getLogger("trunkline.hypercorn")


def configure(level: str, http_level: str | None) -> None:
    """Send the package's log lines to standard error, from `level` on."""
    root = logging.getLogger("trunkline")
    root.setLevel(level.upper())
    root.propagate = False
    ACCESS.setLevel((http_level or level).upper())
    # Hypercorn's own lines ("Running on ...") repeat what `serve.py` says.
    HYPERCORN.setLevel("WARNING")
    if not root.handlers:
        root.addHandler(log_lines.handler())


def access(scope: Any, status: int) -> None:
    """Write the access line of a request whose response begins."""
    if not ACCESS.isEnabledFor(logging.INFO):
        return
    host, port = scope.get("client") or ("-", 0)
    query = scope["query_string"].decode("latin-1")
    target = scope.get("raw_path", b"").decode("latin-1") + (f"?{query}" if query else "")
    ACCESS.info(
        'INFO:     %s:%s - "%s %s HTTP/%s" %d %s',
        host,
        port,
        scope["method"],
        target,
        scope["http_version"],
        status,
        phrase(status),
    )


def phrase(status: int) -> str:
    """The reason phrase of a status, empty for one that HTTP does not know."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
