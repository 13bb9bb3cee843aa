"""A model of one attention layer on any backend, and the same in plain float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.tiny import decoder_config

from trunkline.engine.models.decoder import ForwardResult
from trunkline.engine.operation_program import OperationProgram
from trunkline.kernels import (
    AttentionSpec,
    KvSpec,
    LinearPart,
    LinearSpec,
    ProgramBackend,
    ProgramSizes,
    RotarySpec,
    select_backend,
)
from trunkline.plan import Plan

VOCABULARY = 97
HIDDEN = 32
EPSILON = 1e-5
NUM_SLOTS = 16
NUM_PAGES = 600
MAX_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one attention layer does."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    page_size: int = 16
    spread: float = 0.25  # of the projections' entries: how far scores are apart
    weights: dict[str, torch.Tensor] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {
            "embedding": ((VOCABULARY, HIDDEN), 1.0),
            "q": ((queries, HIDDEN), self.spread),
            "k": ((keys, HIDDEN), self.spread),
            "v": ((keys, HIDDEN), 1.0),
            "o": ((HIDDEN, queries), 0.5),
            "head": ((VOCABULARY, HIDDEN), 0.3),
            "sinks": ((self.num_heads,), 4.0),
        }
        tensors = {
            name: (torch.randn(shape, generator=generator) * spread).bfloat16().float()
            for name, (shape, spread) in shapes.items()
        }
        object.__setattr__(self, "weights", tensors)

    @property
    def frequencies(self) -> torch.Tensor:
        half = self.head_dim // 2
        return 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)


def naive_logprobs(layer: Layer, tokens: list[int]) -> torch.Tensor:
    """Log-probs after the last of `tokens`, in float64."""
    w = {name: tensor.double() for name, tensor in layer.weights.items()}
    x = w["embedding"][torch.tensor(tokens)]
    normed = _norm(x)
    positions = torch.arange(len(tokens), dtype=torch.float32)
    angles = (positions[:, None] * layer.frequencies).double()

    def heads(name: str, count: int) -> torch.Tensor:
        return (normed @ w[name].T).view(len(tokens), count, layer.head_dim)

    def turned(part: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = part.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    groups = layer.num_heads // layer.num_kv_heads
    query = turned(heads("q", layer.num_heads))[-1]
    key = turned(heads("k", layer.num_kv_heads)).repeat_interleave(groups, 1)
    value = heads("v", layer.num_kv_heads).repeat_interleave(groups, 1)
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    scores = torch.einsum("hd,thd->ht", query, key) * scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if layer.window is not None:
        scores[:, : -layer.window] = -torch.inf
    if layer.sinks:
        scores = torch.cat([scores, w["sinks"][:, None]], 1)
    probabilities = torch.softmax(scores, 1)[:, : len(tokens)]
    attended = torch.einsum("ht,thd->hd", probabilities, value).reshape(-1)
    return torch.log_softmax(w["head"] @ _norm(x[-1] + w["o"] @ attended), -1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON)


def attention_driver(layer: Layer, backend_name: str, dtype: torch.dtype) -> Driver:
    """A driver of a program that is that layer; it reports the log-probs of all tokens."""
    backend = select_backend(torch.device("cpu"), dtype, backend_name)
    w = layer.weights
    embedding = backend.create_embedding(VOCABULARY, HIDDEN)
    embedding.load("weight", w["embedding"])
    norm = backend.create_norm(HIDDEN, EPSILON)
    norm.load("weight", torch.ones(HIDDEN))
    parts = tuple(LinearPart(name, w[name].shape[0]) for name in "qkv")
    qkv = backend.create_linear(LinearSpec(HIDDEN, parts))
    for name in "qkv":
        qkv.load(f"{name}.weight", w[name])
    output = backend.create_linear(LinearSpec(w["o"].shape[1], (LinearPart("o", HIDDEN),)))
    output.load("o.weight", w["o"])
    head = backend.create_linear(LinearSpec(HIDDEN, (LinearPart("head", VOCABULARY),)))
    head.load("head.weight", w["head"])
    sinks = None
    if layer.sinks:
        sinks = backend.create_sinks(layer.num_heads)
        sinks.load("sinks", w["sinks"])
    spec = AttentionSpec(
        layer=0,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rotary=backend.create_rotary(RotarySpec(layer.frequencies, 1.0, MAX_CONTEXT)),
        window=layer.window,
        scale=layer.scale,
        soft_cap=layer.soft_cap,
        sinks=sinks,
    )

    def forward(batch: Any) -> ForwardResult:
        x = backend.embed(embedding, batch)
        attended = backend.attend(backend.norm_linear(x, norm, qkv), spec, batch)
        x = backend.linear_add(attended, output, x)
        logits = backend.logits(x, norm, head, batch)
        return ForwardResult(x, logits, backend.pooled_states(x, norm, batch))

    kv = KvSpec(
        num_layers=1,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        num_pages=NUM_PAGES,
        page_size=layer.page_size,
    )
    sizes = ProgramSizes(kv=kv, num_slots=NUM_SLOTS, max_context_len=MAX_CONTEXT)
    program: Any
    if isinstance(backend, ProgramBackend):
        program = backend.create_program(forward, sizes)
    else:
        config = decoder_config("llama", vocab_size=VOCABULARY)
        model: Any = SimpleNamespace(config=config, forward=forward)
        program = OperationProgram(model, backend, sizes)

    def execute(plan: Plan) -> np.ndarray:
        program.forward(plan)
        return program.sample(plan).wait()

    options = SimpleNamespace(
        page_size=layer.page_size, num_pages=NUM_PAGES, max_running_requests=NUM_SLOTS
    )
    runner: Any = SimpleNamespace(options=options, execute=execute)
    return Driver(runner, top_n=VOCABULARY)


def logprobs(sequence: Sequence, index: int) -> np.ndarray:
    """All log-probs of a sequence's output `index`, by token."""
    values = dict(sequence.tops[index])
    return np.array([values[token] for token in range(VOCABULARY)])
