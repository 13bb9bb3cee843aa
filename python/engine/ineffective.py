"""Settings that change nothing beside others or where they are: pure functions.

A log names them at the start, so that none is ignored in silence. What contradicts itself is
refused elsewhere (`computation.py`, `resources.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from trunkline.engine import resources
from trunkline.engine.config import EngineConfig, flat_settings

# Of grammars, where there are none.
_GRAMMAR: Final = ("grammar_compile_timeout", "grammar_cache_bytes", "disable_jump_forward")
_MAX_CONSERVATIVENESS: Final = 1 / resources.FIRST_NEW_TOKEN_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an engine has become of its settings, model and machine.

    `backend` is the kernel backend that was asked for, None: the device's best. `no_grammars` says
    why grammars are refused, None: they are not. A `supervised` engine is a server's child.
    """

    device: torch.device
    backend: str | None
    overlap_depth: int
    max_batch_tokens: int
    max_running_requests: int
    no_grammars: str | None
    model_from_hub: bool
    tokenizer_from_hub: bool
    supervised: bool


def without_effect(config: EngineConfig, there: Surroundings) -> list[str]:
    """A sentence for each given setting that changes nothing. One at its default is not given."""
    defaults = flat_settings(EngineConfig())
    given = {name for name, value in flat_settings(config).items() if value != defaults[name]}
    rules = (_of_graphs, _of_memory, _of_scheduling, _of_server)
    return [
        f"{name} has no effect{why}"
        for rule in rules
        for names, why in rule(config, there)
        for name in names
        if name in given
    ]


_Rules = Iterator[tuple[tuple[str, ...], str]]


def _of_graphs(config: EngineConfig, there: Surroundings) -> _Rules:
    graphs = ("disable_cuda_graph", "cuda_graph_max_bs")
    if there.device.type != "cuda":
        yield graphs, f": there are no CUDA graphs on {there.device}"
    elif there.backend != "triton":
        yield graphs, ": attention_backend 'torch_native' captures no step"
    elif config.kernels.disable_cuda_graph:
        yield ("cuda_graph_max_bs",), ": disable_cuda_graph is given, too"


def _of_memory(config: EngineConfig, there: Surroundings) -> _Rules:
    if config.cache.max_total_tokens is not None:
        size = ": the KV pool is as large as max_total_tokens says"
        yield ("mem_fraction_static",), size
    if not there.model_from_hub:
        yield ("revision",), ": the model is not from a hub"
        if not there.tokenizer_from_hub:
            yield ("download_dir",), ": nothing is fetched from a hub"


def _of_scheduling(config: EngineConfig, there: Surroundings) -> _Rules:
    scheduler, most = config.scheduler, there.max_batch_tokens
    if scheduler.max_prefill_tokens is not None:
        budget = ": max_prefill_tokens is the token budget of every step"
        yield ("target_step_ms", "target_mixed_step_ms"), budget
    chunk = scheduler.chunked_prefill_size
    if chunk is not None and chunk >= most:
        yield ("chunked_prefill_size",), f": no step has more than {most} tokens"
    wanted, running = scheduler.max_running_requests, there.max_running_requests
    if wanted is not None and wanted > running:
        room = ": KV pool and step budget have room for no more sequences"
        yield ("max_running_requests",), f" above {running}{room}"
    if scheduler.schedule_policy == "lpm" and config.cache.disable_radix_cache:
        yield ("schedule_policy",), ": with disable_radix_cache 'lpm' finds no prefix"
    if scheduler.schedule_conservativeness > _MAX_CONSERVATIVENESS:
        reserved = ": all that requests may still generate is reserved then"
        yield ("schedule_conservativeness",), f" above {_MAX_CONSERVATIVENESS:.2f}{reserved}"
    if there.overlap_depth == 0:
        yield ("disable_overlap_schedule",), f": steps never overlap on {there.device}"
    if there.no_grammars is not None:
        yield _GRAMMAR, f": {there.no_grammars.rstrip('.')}"


def _of_server(config: EngineConfig, there: Surroundings) -> _Rules:
    if not there.supervised:
        served = ("served_model_name", "watchdog_timeout")
        yield served, ": it is engine-serve's, and this is an Engine in your process"
    if getattr(logging, config.log_level.upper()) > logging.INFO:
        yield ("decode_log_interval",), f": log_level {config.log_level!r} leaves its lines out"
