"""Tiny random models, written once per session."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.checkpoints import TinyCheckpoint

from trunkline.engine.runner import Runner
from trunkline.plan import Plan


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama in bfloat16, the dtype that most models come in."""
    checkpoint = TinyCheckpoint(config={"torch_dtype": "bfloat16"})
    return str(checkpoint.write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another one, of another family and with other weights."""
    path: Path = tmp_path_factory.mktemp("other")
    return str(TinyCheckpoint(family="qwen3", seed=1).write(path))


@pytest.fixture
def slow_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of embedded engines take 2 ms: a tiny model is through before a queue can fill."""
    forward = Runner.forward

    def slowly(runner: Runner, plan: Plan) -> None:
        time.sleep(0.002)
        forward(runner, plan)

    monkeypatch.setattr(Runner, "forward", slowly)
