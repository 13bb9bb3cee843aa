"""Settings that change nothing are named in the log, and no others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from trunkline.engine.config import flat_settings
from trunkline.engine.engine import Engine
from trunkline.engine.ineffective import Surroundings, without_effect
from trunkline.engine.launch import engine_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BUDGET = ": max_prefill_tokens is the token budget of every step"
NO_GRAPHS_ON_CPU = ": there are no CUDA graphs on cpu"
NO_GRAPHS_OF_TORCH = ": attention_backend 'torch_native' captures no step"
NO_GRAMMARS = ": this server was started with --grammar-backend none"


def named(settings: dict[str, Any], **there: Any) -> list[str]:
    around: dict[str, Any] = {
        "device": CPU,
        "backend": None,
        "overlap_depth": 0,
        "max_batch_tokens": 512,
        "max_running_requests": 100,
        "no_grammars": None,
        "model_from_hub": False,
        "tokenizer_from_hub": False,
        "supervised": True,
    }
    return without_effect(engine_config(settings), Surroundings(**{**around, **there}))


ON_CUDA = {"device": CUDA, "backend": "triton", "overlap_depth": 1}
NAMED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"disable_cuda_graph": True}, {}, [f"disable_cuda_graph{NO_GRAPHS_ON_CPU}"]),
    ({"cuda_graph_max_bs": 8}, {}, [f"cuda_graph_max_bs{NO_GRAPHS_ON_CPU}"]),
    (
        {"cuda_graph_max_bs": 8, "disable_cuda_graph": True},
        {**ON_CUDA, "backend": "torch"},
        [f"disable_cuda_graph{NO_GRAPHS_OF_TORCH}", f"cuda_graph_max_bs{NO_GRAPHS_OF_TORCH}"],
    ),
    (
        {"disable_cuda_graph": True, "cuda_graph_max_bs": 8},
        ON_CUDA,
        ["cuda_graph_max_bs: disable_cuda_graph is given, too"],
    ),
    (
        {"mem_fraction_static": 0.5, "max_total_tokens": 1000},
        {},
        ["mem_fraction_static: the KV pool is as large as max_total_tokens says"],
    ),
    (
        {"max_prefill_tokens": 512, "target_step_ms": 100, "target_mixed_step_ms": 9},
        {},
        [f"target_step_ms{BUDGET}", f"target_mixed_step_ms{BUDGET}"],
    ),
    (
        {"chunked_prefill_size": 512},
        {},
        ["chunked_prefill_size: no step has more than 512 tokens"],
    ),
    (
        {"max_running_requests": 101},
        {},
        ["max_running_requests above 100: KV pool and step budget have room for no more sequences"],
    ),
    (
        {"schedule_policy": "lpm", "disable_radix_cache": True},
        {},
        ["schedule_policy: with disable_radix_cache 'lpm' finds no prefix"],
    ),
    (
        {"schedule_conservativeness": 1.5},
        {},
        [
            "schedule_conservativeness above 1.43: all that requests may still generate is "
            "reserved then"
        ],
    ),
    (
        {"disable_overlap_schedule": True},
        {},
        ["disable_overlap_schedule: steps never overlap on cpu"],
    ),
    (
        {
            "grammar_backend": "none",
            "grammar_compile_timeout": 1.0,
            "grammar_cache_bytes": 1 << 20,
            "disable_jump_forward": True,
        },
        {"no_grammars": "this server was started with --grammar-backend none."},
        [
            f"grammar_compile_timeout{NO_GRAMMARS}",
            f"grammar_cache_bytes{NO_GRAMMARS}",
            f"disable_jump_forward{NO_GRAMMARS}",
        ],
    ),
    (
        {"revision": "main", "download_dir": "/models"},
        {},
        ["revision: the model is not from a hub", "download_dir: nothing is fetched from a hub"],
    ),
    (
        {"revision": "main", "download_dir": "/models"},
        {"tokenizer_from_hub": True},
        ["revision: the model is not from a hub"],
    ),
    (
        {"served_model_name": "name", "watchdog_timeout": 9.0},
        {"supervised": False},
        [
            "served_model_name: it is engine-serve's, and this is an Engine in your process",
            "watchdog_timeout: it is engine-serve's, and this is an Engine in your process",
        ],
    ),
    (
        {"log_level": "warning", "decode_log_interval": 9},
        {},
        ["decode_log_interval: log_level 'warning' leaves its lines out"],
    ),
]
EFFECTIVE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"disable_cuda_graph": True}, ON_CUDA),
    ({"cuda_graph_max_bs": 8}, ON_CUDA),
    ({"mem_fraction_static": 0.5}, {}),
    ({"max_prefill_tokens": 512}, {}),
    ({"target_step_ms": 100, "target_mixed_step_ms": 9}, {}),
    ({"chunked_prefill_size": 511}, {}),
    ({"chunked_prefill_size": -1}, {}),
    ({"max_running_requests": 100}, {}),
    ({"schedule_policy": "lpm"}, {}),
    ({"disable_radix_cache": True}, {}),
    ({"schedule_conservativeness": 1.4}, {}),
    ({"disable_overlap_schedule": True}, ON_CUDA),
    ({"grammar_compile_timeout": 1.0, "disable_jump_forward": True}, {}),
    ({"grammar_backend": "none"}, {"no_grammars": "none."}),
    ({"revision": "main", "download_dir": "/models"}, {"model_from_hub": True}),
    ({"served_model_name": "name", "watchdog_timeout": 9.0}, {}),
    ({"decode_log_interval": 9}, {}),
]


@pytest.mark.parametrize(("settings", "there", "lines"), NAMED)
def test_what_changes_nothing_is_named(
    settings: dict[str, Any], there: dict[str, Any], lines: list[str]
) -> None:
    assert [line.replace(" has no effect", "") for line in named(settings, **there)] == lines


@pytest.mark.parametrize(("settings", "there"), EFFECTIVE)
def test_what_changes_something_is_not(settings: dict[str, Any], there: dict[str, Any]) -> None:
    assert named(settings, **there) == []


def test_defaults_are_not_given() -> None:
    """However an engine has turned out: nobody has asked for them."""
    around = {"max_batch_tokens": 2, "max_running_requests": 1}
    assert named({}, supervised=False, no_grammars="no.", **around) == []
    every = flat_settings(engine_config({}))
    assert named(every) == []


def test_an_engine_names_them_when_it_starts(
    tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"max_total_tokens": 1024, "max_prefill_tokens": 64}
    with (
        caplog.at_level(logging.WARNING),
        Engine(
            tiny_model,
            **settings,
            target_step_ms=9.0,
            chunked_prefill_size=64,
            max_running_requests=1000,
        ),
    ):
        found = [one.getMessage() for one in caplog.records]
    assert found[:2] == [
        f"target_step_ms has no effect{BUDGET}",
        "chunked_prefill_size has no effect: no step has more than 64 tokens",
    ]
    assert found[2].startswith("max_running_requests has no effect above ")
    assert len(found) == 3
