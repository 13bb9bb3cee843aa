"""Tiny random models, written once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoints import TinyCheckpoint


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
