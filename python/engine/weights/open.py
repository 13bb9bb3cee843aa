"""Choosing how to read a model: by what its path is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trunkline.engine.checkpoint import Checkpoint, CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.weights.default_model import default_model_path
from trunkline.engine.weights.gguf_checkpoint import GgufCheckpoint


def open_checkpoint(options: ModelOptions) -> Checkpoint:
    """Open the model that `options` name, without reading weights or importing torch.

    Raises:
        CheckpointError: no such model, or one that cannot be served; the message names file, tensor
            or key, and the remedy.
    """
    overrides = _overrides(options.json_model_override_args)
    path = default_model_path() if options.model_path is None else Path(options.model_path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path, overrides)
    raise CheckpointError(f"no model at {path}")


def _overrides(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"--json-model-override-args is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError("--json-model-override-args must be a JSON object")
    return values
