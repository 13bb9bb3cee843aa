"""Log lines on standard error, in the form that operators' tools read: `[date time] text`."""

from __future__ import annotations

import logging
import sys


def handler() -> logging.Handler:
    """A handler that writes such lines."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    return lines
