"""Loggers of the server, and its access lines."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from trunkline.engine import log_lines

SERVER = logging.getLogger("trunkline.server")
ACCESS = logging.getLogger("trunkline.access")
HYPERCORN = logging.getLogger("trunkline.hypercorn")
# Clients of other services put keys into the query.
_SECRET = re.compile("key|token|secret|passw|auth|signature", re.I)


class _Without(logging.Filter):
    """Leaves out access lines of paths that begin in certain ways."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        super().__init__()
        self.prefixes = tuple(prefixes)

    def filter(self, record: logging.LogRecord) -> bool:
        target = record.args[3] if isinstance(record.args, tuple) and len(record.args) > 3 else ""
        return not str(target).startswith(self.prefixes)


def configure(level: str, http_level: str | None, quiet_paths: Sequence[str] = ()) -> None:
    """Send the package's log lines to standard error, from `level` on.

    Access lines of paths that begin with one of `quiet_paths` are left out.
    """
    root = logging.getLogger("trunkline")
    root.setLevel(level.upper())
    root.propagate = False
    ACCESS.setLevel((http_level or level).upper())
    ACCESS.filters = [_Without(quiet_paths)] if quiet_paths else []
    # Hypercorn's own lines ("Running on ...") repeat what `serve.py` says.
    HYPERCORN.setLevel("WARNING")
    if not root.handlers:
        root.addHandler(log_lines.handler())


def access(scope: Any, status: int) -> None:
    """Write the access line of a request whose response begins; secrets in it are replaced."""
    if not ACCESS.isEnabledFor(logging.INFO):
        return
    host, port = scope.get("client") or ("-", 0)
    query = query_without_secrets(scope["query_string"].decode("latin-1"))
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


def query_without_secrets(query: str) -> str:
    """A query with the values of parameters replaced whose names tell of a secret."""
    return "&".join(
        f"{name}=***" if equals and _SECRET.search(name) else name + equals + value
        for name, equals, value in (one.partition("=") for one in query.split("&"))
    )


def phrase(status: int) -> str:
    """The reason phrase of a status, empty for one that HTTP does not know."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
