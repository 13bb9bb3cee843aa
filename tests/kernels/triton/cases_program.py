"""Launches of whole steps: what the program hands to the kernels is what compiles.

Nothing is computed, so tokens mean nothing; the host's part of a step runs as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tests.kernels.plan_builder import Opened, Params, build_plan, opened_sections
from tests.kernels.tiny import decoder_config
from tests.kernels.triton.cross_compile import Launch

from trunkline.engine.models.registry import model_factory
from trunkline.kernels import BackendOptions, KvSpec, ProgramSizes
from trunkline.kernels.triton.backend import TritonBackend
from trunkline.kernels.triton.launch import DeviceTraits
from trunkline.kernels.triton.page_list import list_pages

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_layers": 1,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position": 4096,
}
# Gemma 2B, Gemma 2 9B and Gemma 3 12B: wide heads, norms of 1 + weight, layers with and without a
# window, post norms.
GEMMA_SIZES = {
    "gemma": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256},
    "gemma2": {
        "num_layers": 2,
        "num_heads": 16,
        "head_dim": 256,
        "sliding_window": 64,
        "sliding_layers": (True, False),
        "attention_soft_cap": 50.0,
        "logit_soft_cap": 30.0,
    },
    "gemma3": {
        "num_layers": 2,
        "num_heads": 16,
        "head_dim": 256,
        "sliding_window": 64,
        "sliding_layers": (True, False),
    },
}
FAMILIES = ("qwen3", "qwen2-mixed-window", "qwen3-moe", *GEMMA_SIZES)
PROMPT = 40
# Greedy; at random; with everything that changes logits.
SAMPLES = (
    Params(),
    Params(temperature=0.8, top_p=0.9, top_k=20, min_p=0.05),
    Params(
        temperature=0.8,
        frequency=0.5,
        repetition=1.1,
        min_new_tokens=4,
        suppressed=[2],
        bias={7: 1.0},
        grammar=True,
        processed=True,
    ),
)


def _rows(query_len: int, computed: int) -> dict[str, Any]:
    rows = np.arange(len(SAMPLES))
    count = rows.size
    return {
        "row_slot": rows,
        "row_query_len": np.full(count, query_len),
        "row_computed_len": np.full(count, computed),
        "row_token_source": np.zeros(count),
        "token_ids": np.zeros(count * query_len),
        "positions": np.tile(np.arange(computed, computed + query_len), count),
        "logit_tokens": (rows + 1) * query_len - 1,
        "logit_flags": np.zeros(count),
        "sample_logit": rows,
        "sample_slot": rows,
        "sample_position": np.full(count, computed + query_len),
    }


def plans() -> Iterator[Any]:
    count = len(SAMPLES)
    nothing = {
        "logit_top_n": np.zeros(count),
        "score_offsets": np.zeros(count + 1),
        "sample_flags": np.zeros(count),
    }
    wanted = {
        "logit_top_n": np.full(count, 3),
        "score_offsets": [0, 1, 1, 2],
        "score_ids": [5, 6],
        "sample_flags": np.ones(count),
    }
    opened = opened_sections([Opened(slot, PROMPT, p, [9]) for slot, p in enumerate(SAMPLES)])
    pages = [[0, slot, index, 1 + 4 * slot + index] for slot in range(count) for index in range(4)]
    moves = {"page_moves": [[0, 20, 0, 21, 7, 0]]}
    first = {**opened, "page_writes": pages, **moves}
    yield build_plan(1, {**_rows(PROMPT, 0), **wanted, **first})
    yield build_plan(2, {**_rows(1, PROMPT), **wanted})
    plain = opened_sections([Opened(slot, PROMPT, SAMPLES[1]) for slot in range(count)])
    yield build_plan(3, {**_rows(1, PROMPT + 1), **nothing, **plain})


def run_steps(device: torch.device, family: str, options: dict[str, Any], **changes: Any) -> None:
    """A prompt, and decode steps with and without everything that a sample can want.

    Args:
        device: where tensors are made.
        family: of `tiny.decoder_config`.
        options: of `BackendOptions`.
        changes: of the model's sizes.
    """
    chosen = BackendOptions(attention="triton", max_graph_batch=4, **options)
    backend = TritonBackend(device, torch.bfloat16, chosen)
    config = decoder_config(family, **{**SIZES, **GEMMA_SIZES.get(family, {}), **changes})
    with torch.inference_mode():
        model = model_factory(config.architecture)(config, backend, config.max_position, False)
    kv = KvSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=32,
        page_size=16,
    )
    sizes = ProgramSizes(kv=kv, num_slots=8, max_context_len=config.max_position)
    made = backend.create_program(model.forward, sizes)
    masks = np.full((len(SAMPLES), config.vocab_size // 32), -1, np.int32)
    for plan in plans():
        made.forward(plan)
        made.sample(plan, masks)


def _list_pages() -> None:
    integers = {"dtype": torch.int32}
    list_pages(
        torch.empty((9, 700), **integers),
        torch.empty(3, **integers),
        torch.empty(4, **integers),
        torch.empty(604, **integers),
    )


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Norms of queries and keys, windows and biases, experts; every Gemma."""
    yield Launch("page list", _list_pages)
    families = ("qwen3",) if quick else FAMILIES
    modes: tuple[dict[str, Any], ...] = ({}, {"deterministic": True})
    if not quick and traits.capability >= 89:
        modes += ({"kv_dtype": "fp8_e4m3"},)
    for family in families:
        for options in modes:
            yield Launch(
                f"steps of {family} {options}",
                partial(run_steps, torch.device("cpu"), family, options),
            )
