"""Building a model from a checkpoint, one tensor at a time.

Every tensor of the checkpoint must have a place and every place a tensor. It knows names and
shapes, not formats (`weights/`) and not what a handle does with a tensor (`kernels/`).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trunkline.engine.checkpoint import BlockCheckpoint, Checkpoint, CheckpointError
from trunkline.engine.models.registry import Model, model_factory
from trunkline.engine.weights.progress import ProgressBar
from trunkline.kernels import Backend, BlockBackend, BlockTensor, Weight

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Buffers that older checkpoints carry; they follow from the config.
SKIPPED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint, backend: Backend, num_positions: int, progress: bool | None = None
) -> Model:
    """Build the checkpoint's model and load its weights.

    With `tie_word_embeddings`, a checkpoint that has only one of embedding and head uses it for
    both; one that has both uses both, as transformers does.

    Args:
        checkpoint: an opened checkpoint.
        backend: owner of the weights.
        num_positions: longest sequence.
        progress: show a bar on stderr; None: if it is a terminal.

    Raises:
        CheckpointError: the architecture is unknown; a tensor is missing, superfluous or of the
            wrong shape.
    """
    config = checkpoint.config
    names = checkpoint.tensor_names
    tied = config.tie_word_embeddings and not {EMBEDDING, HEAD} <= names
    if config.tie_word_embeddings and not tied:
        logger.info("the checkpoint ties its embeddings but has %s: it is used", HEAD)
    try:
        model = model_factory(config.architecture)(config, backend, num_positions, tied)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    places = _places(model)
    if tied and EMBEDDING not in names:
        places[HEAD] = places.pop(EMBEDDING)
    _check_names(places, names)
    tensors = ProgressBar(
        _tensors(checkpoint, backend),
        total=len(checkpoint.tensor_names),
        desc="Loading weights",
        unit="tensor",
        disable=not (sys.stderr.isatty() if progress is None else progress),
    )
    _load(tensors, places)
    return model


def _tensors(
    checkpoint: Checkpoint, backend: Backend
) -> Iterable[tuple[str, torch.Tensor | BlockTensor]]:
    kinds = backend.block_kinds if isinstance(backend, BlockBackend) else frozenset()
    if kinds and isinstance(checkpoint, BlockCheckpoint):
        return checkpoint.stored_tensors(kinds)
    return checkpoint.tensors()


def _places(model: Model) -> dict[str, tuple[Weight, str]]:
    return {
        prefix + part: (weight, part)
        for prefix, weight in model.weights()
        for part in weight.shapes
    }


def _check_names(places: dict[str, tuple[Weight, str]], names: frozenset[str]) -> None:
    missing = sorted(places.keys() - names)
    if missing:
        raise CheckpointError(f"the checkpoint has no tensor {_listed(missing)}")
    extra = sorted(name for name in names - places.keys() if not SKIPPED.fullmatch(name))
    if extra:
        raise CheckpointError(f"the architecture has no place for tensor {_listed(extra)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _load(
    tensors: Iterable[tuple[str, torch.Tensor | BlockTensor]],
    places: dict[str, tuple[Weight, str]],
) -> None:
    remaining = dict(places)
    for name, tensor in tensors:
        if name not in places:
            continue
        if name not in remaining:
            raise CheckpointError(f"the checkpoint yields tensor {name} twice")
        weight, part = remaining.pop(name)
        expected = weight.shapes[part]
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(tensor.shape)}, the config needs {expected}"
            )
        weight.load(part, tensor)
    if remaining:
        raise CheckpointError(f"the checkpoint did not yield tensor {_listed(sorted(remaining))}")
