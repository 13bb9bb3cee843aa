"""An engine on the Triton backend answers as one on the reference backend does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import TinyCheckpoint

from trunkline.engine.engine import Engine

PROMPTS = ["The quick brown fox", "Pack my box with five dozen", "def add(first, second):"]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "regex": "[a-c]{2,4}", "logit_bias": {"70": 2.0}},
]
SETTINGS = {
    "max_total_tokens": 1024,
    "max_prefill_tokens": 32,
    "context_length": 128,
    "max_running_requests": 4,
    "log_level": "warning",
}


def answers(directory: Path, **settings: Any) -> list[tuple[str, list[Any]]]:
    with Engine(model_path=str(directory), **SETTINGS, **settings) as engine:
        made = engine.generate(
            PROMPTS,
            [{"max_new_tokens": 5, "min_new_tokens": 2, **one} for one in SAMPLING],
            return_logprob=True,
            top_logprobs_num=2,
        )
    return [
        (one["text"], [entry[1] for entry in one["meta_info"]["output_token_logprobs"]])
        for one in made
    ]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_same_answers(tmp_path: Path, deterministic: bool) -> None:
    directory = TinyCheckpoint(family="qwen3").write(tmp_path / "model")
    got = answers(
        directory, attention_backend="triton", enable_deterministic_inference=deterministic
    )
    assert got == answers(directory, attention_backend="torch_native")
