"""Every environment variable that the engine reads, each with its meaning and its check.

Variables of the libraries underneath (torch, the hub client) are theirs and not listed.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "TRUNKLINE_CACHE"
STEP_TIMES = "TRUNKLINE_STEP_TIMES"


class EnvironmentVariableError(Exception):
    """An environment variable has an unusable value; the message names variable, value and rule."""


def cache_directory() -> Path:
    """Where the embedded default model is kept.

    `TRUNKLINE_CACHE` (an absolute path) if set, else `trunkline` below the user's cache directory
    (`XDG_CACHE_HOME`, or `~/.cache`).

    Raises:
        EnvironmentVariableError: the path is relative, or exists and is not a directory.
    """
    value = os.environ.get(CACHE)
    if value is None:
        # The XDG rule: a relative XDG_CACHE_HOME counts as unset.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "trunkline"
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise EnvironmentVariableError(f"{CACHE}={value!r} must be an absolute path")
    if path.exists() and not path.is_dir():
        raise EnvironmentVariableError(f"{CACHE}={value!r} exists and is not a directory")
    return path


def step_times_file() -> Path | None:
    """Where the engine appends what each step computed and how long it took; None: nowhere.

    `TRUNKLINE_STEP_TIMES` (an absolute path). `bench/fit_steps.py` reads the file.

    Raises:
        EnvironmentVariableError: the path is relative, or its directory does not exist.
    """
    value = os.environ.get(STEP_TIMES)
    if value is None:
        return None
    path = Path(value)
    if not path.is_absolute() or not path.parent.is_dir():
        message = f"{STEP_TIMES}={value!r} must be an absolute path in a directory that exists"
        raise EnvironmentVariableError(message)
    return path
