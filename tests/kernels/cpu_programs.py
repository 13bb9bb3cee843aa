"""Models without layers, whose logits are exactly what a test wants, on any backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tests.kernels.tiny import decoder_config

from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.models.decoder import ForwardResult
from trunkline.engine.operation_program import OperationProgram
from trunkline.kernels import (
    KvSpec,
    LinearPart,
    LinearSpec,
    ProgramBackend,
    ProgramSizes,
    StepProgram,
    Weight,
    select_backend,
)

WIDTH = 16  # also the number of prompts that give different logits
SIZES = ProgramSizes(
    kv=KvSpec(num_layers=1, num_kv_heads=1, head_dim=16, num_pages=64, page_size=16),
    num_slots=32,
    max_context_len=64,
)


@dataclass
class LogitsModel:
    """Logits of a token t are column t of `table`, exactly: hidden states are unit vectors."""

    config: DecoderConfig
    forward: Callable[[Any], ForwardResult]
    weights: Mapping[str, Weight]


def logits_program(backend_name: str, table: torch.Tensor, dtype: torch.dtype) -> StepProgram:
    """A program whose logits after token t are `table[:, t]`.

    Args:
        backend_name: cpu or torch.
        table: [vocabulary, WIDTH].
        dtype: what the backend computes in; entries of the table times 1/4 must be exact in it.
    """
    backend = select_backend(torch.device("cpu"), dtype, backend_name)
    vocabulary = table.shape[0]
    embedding = backend.create_embedding(vocabulary, WIDTH)
    units = torch.zeros(vocabulary, WIDTH)
    units[:WIDTH] = torch.eye(WIDTH)
    embedding.load("weight", units)
    norm = backend.create_norm(WIDTH, 0.0)
    norm.load("weight", torch.ones(WIDTH))
    head = backend.create_linear(LinearSpec(WIDTH, (LinearPart("head", vocabulary),)))
    # A unit vector's norm is 1/4: the normed one is 4 times it.
    head.load("head.weight", table / 4)

    def forward(batch: Any) -> ForwardResult:
        x = backend.embed(embedding, batch)
        logits = backend.logits(x, norm, head, batch)
        return ForwardResult(x, logits, backend.pooled_states(x, norm, batch))

    if isinstance(backend, ProgramBackend):
        return backend.create_program(forward, SIZES)
    weights = {"embedding": embedding, "norm": norm, "head": head}
    config = decoder_config("llama", vocab_size=vocabulary)
    return OperationProgram(LogitsModel(config, forward, weights), backend, SIZES)  # type: ignore[arg-type]


def random_logits(vocabulary: int, spread: float, seed: int) -> torch.Tensor:
    """[vocabulary, WIDTH] float32, some of them equal."""
    generator = np.random.default_rng(seed)
    values = generator.normal(0, spread, (vocabulary, WIDTH)).astype(np.float32)
    repeated = generator.integers(0, vocabulary, vocabulary // 8)
    values[repeated] = values[generator.integers(0, vocabulary, repeated.size)]
    return torch.from_numpy(values)
