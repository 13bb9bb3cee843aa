"""What grammars of the real backend say of their memory."""

from __future__ import annotations

import ctypes
import json
import sys
from unittest import mock

import psutil
import pytest

from trunkline.engine.config import EngineConfig
from trunkline.engine.grammar.backend import Vocabulary
from trunkline.engine.grammar.xgrammar_backend import XgrammarBackend
from trunkline.engine.launch import engine_config
from trunkline.engine.messages import GrammarSpec
from trunkline.engine.weights import open_checkpoint


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def backend(tiny_model: str) -> XgrammarBackend:
    config: EngineConfig = engine_config({"model_path": tiny_model})
    checkpoint = open_checkpoint(config.model)
    vocabulary = Vocabulary.of(checkpoint.tokenizer, checkpoint.config.vocab_size, [2])
    return XgrammarBackend(vocabulary)


@pytest.mark.skipif(sys.platform != "linux", reason="needs malloc_trim")
def test_loaded_grammars_take_no_more_memory_than_they_say(backend: XgrammarBackend):
    schema = {
        "type": "object",
        "properties": {f"name_{n}": {"type": "string", "maxLength": 30} for n in range(4)},
        "additionalProperties": True,
    }
    data = backend.compile(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    before = resident_bytes()
    loaded = [backend.load(data) for _ in range(20)]
    taken = resident_bytes() - before
    assert taken < 1.1 * sum(one.num_bytes for one in loaded)


def test_memory_that_runs_out_is_told_as_such(backend: XgrammarBackend):
    error = RuntimeError("std::bad_alloc")
    spec = GrammarSpec(kind="regex", text="a")
    with (
        mock.patch.object(XgrammarBackend, "_compile", side_effect=error),
        pytest.raises(MemoryError),
    ):
        backend.compile(spec)
