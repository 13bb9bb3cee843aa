"""Which model is opened: by path, load format, hub id, and the options around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from tests.checkpoints import TinyCheckpoint, tiny_tokenizer, write_json, write_tokenizer
from tests.gguf_files import TinyGguf

from trunkline.engine.checkpoint import Checkpoint, CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.layout import expected_tensors


def open_path(path: Path | str, **options: Any) -> Checkpoint:
    return open_checkpoint(ModelOptions(model_path=str(path), **options))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nowhere.gguf", {}, "there is no file or directory '.*nowhere.gguf'"),
        ("nowhere", {}, "there is no file or directory '.*nowhere'; give a Hugging Face directory"),
        ("empty", {}, "has neither a config.json nor a .gguf file"),
        ("file.txt", {}, "is neither a directory nor a .gguf file"),
        ("two", {}, "has several .gguf files: a.gguf, b.gguf; give one"),
        ("hf", {"load_format": "gguf"}, "has neither a config.json nor a .gguf file"),
        ("hf", {"load_format": "pt"}, r"has no weights: no pytorch_model\*.bin"),
        ("one/a.gguf", {"load_format": "pt"}, "cannot be loaded with load format 'pt'"),
        ("hf", {"json_model_override_args": "{"}, "--json-model-override-args is not JSON"),
        ("hf", {"json_model_override_args": "[]"}, "must be a JSON object"),
        ("hf", {"tokenizer_path": "/nowhere/at all"}, "there is no tokenizer at '/nowhere/at all'"),
    ],
)
def test_what_cannot_be_opened_is_named(
    tmp_path: Path, path: str, options: dict[str, str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    for name in ("two/a.gguf", "two/b.gguf", "one/a.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        TinyGguf().write(tmp_path / name)
    TinyCheckpoint().write(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=message):
        open_path(tmp_path / path, **options)


@pytest.mark.parametrize("load_format", ["auto", "gguf"])
def test_a_directory_with_one_gguf_file(tmp_path: Path, load_format: str) -> None:
    TinyGguf().write(tmp_path / "tiny.gguf")
    checkpoint = open_path(tmp_path, load_format=load_format)
    assert checkpoint.config.model_type == "llama"
    assert checkpoint.source == str(tmp_path)


def test_overrides_are_merged_into_the_config(tmp_path: Path) -> None:
    TinyCheckpoint().write(tmp_path)
    config = open_path(tmp_path, json_model_override_args='{"rope_theta": 7.0}').config
    assert config.rope.theta == 7.0
    assert config.num_layers == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_thteta": 7.0}, "sets 'rope_thteta', which changes nothing for this model"),
        ({"rope_thteta": 7.0}, "did you mean rope_theta?"),
        ({"final_logit_softcapping": 30.0}, "sets 'final_logit_softcapping'"),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 8.0}}, "sets 'rope_theta'"),
        ({"num_experts": 4}, "sets 'num_experts'"),
    ],
)
def test_overrides_that_change_nothing_are_refused(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    TinyCheckpoint().write(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_path(tmp_path, json_model_override_args=json.dumps(keys))
    assert message in str(caught.value)


def test_overrides_of_a_gguf_file_that_change_nothing_are_refused(tmp_path: Path) -> None:
    TinyGguf().write(tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match="sets 'eos_token_id'"):
        open_path(tmp_path / "tiny.gguf", json_model_override_args='{"eos_token_id": 1}')


def test_ends_may_be_overridden(tmp_path: Path) -> None:
    TinyCheckpoint().write(tmp_path)
    checkpoint = open_path(tmp_path, json_model_override_args='{"eos_token_id": 5}')
    assert 5 in checkpoint.generation.eos_token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_dummy_weights_need_only_a_config(tmp_path: Path, family: str, dtype: str) -> None:
    tiny = TinyCheckpoint(family=family, config={"torch_dtype": dtype})
    write_json(tmp_path / "config.json", tiny.config_values)
    first = dict(open_path(tmp_path, load_format="dummy").tensors())
    second = dict(open_path(tmp_path, load_format="dummy").tensors())
    config = open_path(tmp_path, load_format="dummy").config
    assert {name: tuple(t.shape) for name, t in first.items()} == expected_tensors(config)
    for name, tensor in first.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, second[name])
    assert first["model.embed_tokens.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)


def test_dummy_weights_of_a_gguf_file(tmp_path: Path) -> None:
    TinyGguf().write(tmp_path / "tiny.gguf")
    checkpoint = open_path(tmp_path / "tiny.gguf", load_format="dummy")
    assert dict(checkpoint.tensors())["model.norm.weight"].dtype == torch.bfloat16


def test_the_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    TinyCheckpoint(with_tokenizer=False).write(tmp_path / "model")
    (tmp_path / "directory").mkdir()
    write_tokenizer(tmp_path / "directory", "{{ bos_token }} elsewhere")
    tiny_tokenizer(add_bos=False).save(str(tmp_path / "other.json"))
    TinyGguf(metadata={"tokenizer.ggml.add_bos_token": True}).write(tmp_path / "tiny.gguf")
    expected = {"directory": True, "directory/tokenizer.json": True, "other.json": False}
    for name, has_bos in (expected | {"tiny.gguf": True}).items():
        checkpoint = open_path(tmp_path / "model", tokenizer_path=str(tmp_path / name))
        assert (checkpoint.tokenizer.encode("fox")[0] == 1) is has_bos
    checkpoint = open_path(tmp_path / "model", tokenizer_path=str(tmp_path / "directory"))
    message = {"role": "user", "content": "x"}
    assert checkpoint.chat_template.render([message]) == "<s> elsewhere"


class FakeHub:
    """Stands for the hub: one model, of which each call fetches what it asks for."""

    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        self.directory = directory
        self.error = error
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        if self.error is not None:
            raise self.error
        return str(self.directory)


@pytest.mark.parametrize(
    ("weight_format", "load_format", "patterns"),
    [
        ("safetensors", "auto", [["*.safetensors"]]),
        ("safetensors", "safetensors", [["*.safetensors"]]),
        ("pt", "auto", [["*.safetensors"], ["*.bin"]]),
        ("pt", "pt", [["*.bin"]]),
        ("safetensors", "dummy", [[]]),
    ],
)
def test_only_what_is_needed_is_fetched_from_the_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_format: str,
    load_format: str,
    patterns: list[list[str]],
) -> None:
    hub = FakeHub(TinyCheckpoint(weight_format=weight_format).write(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    checkpoint = open_path(
        "owner/a-model.v2", load_format=load_format, revision="abc", download_dir="/cache"
    )
    assert checkpoint.source == "owner/a-model.v2"
    assert checkpoint.config.num_layers == 3
    small = ["*.json", "*.jinja", "tokenizer.model"]
    assert [call["allow_patterns"] for call in hub.calls] == [small + each for each in patterns]
    for call in hub.calls:
        assert (call["repo_id"], call["revision"]) == ("owner/a-model.v2", "abc")
        assert call["cache_dir"] == "/cache"


def not_found() -> Exception:
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "hub:"))
    return RepositoryNotFoundError("404: no such repository", response=response)


@pytest.mark.parametrize(
    "error", [not_found(), LocalEntryNotFoundError("offline"), OSError("no route")]
)
def test_a_hub_that_fails_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    hub = FakeHub(tmp_path, error)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(CheckpointError, match=r"'owner/model' here, .*at revision 'x'.*HF_TOKEN"):
        open_path("owner/model", revision="x")


def test_the_hub_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the hub cache must already hold the model"):
        open_path("owner/model", download_dir=str(tmp_path))


def test_gguf_files_are_not_picked_from_the_hub() -> None:
    with pytest.raises(CheckpointError, match="download the one that you want from owner/model"):
        open_path("owner/model", load_format="gguf")


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_opening_does_not_import_torch(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("model" if kind == "directory" else "model.gguf")
    if kind == "directory":
        TinyCheckpoint().write(path)
    else:
        TinyGguf().write(path)
    program = (
        "import sys\n"
        "from trunkline.engine.config import ModelOptions\n"
        "from trunkline.engine.weights import open_checkpoint\n"
        "checkpoint = open_checkpoint(ModelOptions(model_path=sys.argv[1]))\n"
        "checkpoint.tokenizer.encode('x'), checkpoint.chat_template, checkpoint.generation\n"
        "assert checkpoint.tensor_names\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, env=environment)


def test_loading_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    checkpoint = open_path(TinyCheckpoint().write(tmp_path))
    assert len(list(checkpoint.tensors())) == len(checkpoint.tensor_names)
    assert set(threading.enumerate()) <= before
