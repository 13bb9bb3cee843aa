"""Reading JSON files of a model, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trunkline.engine.checkpoint import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file is missing, unreadable or holds anything else.
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def read_optional_object(path: Path) -> dict[str, Any]:
    """As `read_object`, but empty if there is no such file."""
    return read_object(path) if path.exists() else {}
