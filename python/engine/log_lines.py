"""Log lines on standard error, in the form that operators' tools read: `[date time] text`."""

from __future__ import annotations

import logging
import sys


def handler(tag: str = "") -> logging.Handler:
    """A handler that writes such lines; a tag tells which of several processes they are of."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(
        logging.Formatter(f"[%(asctime)s{tag and f' {tag}'}] %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    return lines
