"""Hugging Face directories: sharded or not, tied or not, whole or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import FAMILIES, TinyCheckpoint, write_json, write_weights
from transformers import AutoModelForCausalLM

from trunkline.engine.checkpoint import Checkpoint, CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.weights import open_checkpoint


def open_directory(directory: Path, **options: str) -> Checkpoint:
    return open_checkpoint(ModelOptions(model_path=str(directory), **options))


def assert_same(ours: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    found = dict(ours.tensors())
    assert found.keys() == expected.keys() == ours.tensor_names
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("weight_format", ["safetensors", "pt"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_written(
    tmp_path: Path, family: str, num_shards: int, weight_format: str
) -> None:
    tiny = TinyCheckpoint(family=family, num_shards=num_shards, weight_format=weight_format)
    assert_same(open_directory(tiny.write(tmp_path)), tiny.tensors())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_keep_their_dtype(tmp_path: Path, dtype: str) -> None:
    tiny = TinyCheckpoint(config={"torch_dtype": dtype})
    checkpoint = open_directory(tiny.write(tmp_path))
    assert checkpoint.config.dtype == dtype
    assert_same(checkpoint, tiny.tensors())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("weight_format", ["safetensors", "pt"])
def test_reads_what_transformers_writes(
    tmp_path: Path, family: str, tied: bool, weight_format: str
) -> None:
    source = TinyCheckpoint(family=family, config={"tie_word_embeddings": tied}).write(
        tmp_path / "ours"
    )
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    checkpoint = open_directory(tmp_path / "theirs")
    assert checkpoint.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in checkpoint.tensor_names) is not tied
    state = model.state_dict()
    assert_same(checkpoint, {name: state[name] for name in checkpoint.tensor_names})


def test_a_missing_head_of_an_untied_model_is_named(tmp_path: Path) -> None:
    tiny = TinyCheckpoint()
    tensors = tiny.tensors()
    del tensors["lm_head.weight"]
    write_json(tmp_path / "config.json", tiny.config_values)
    write_weights(tmp_path, tensors, 1, "safetensors")
    with pytest.raises(
        CheckpointError, match=r"lacks tensor 'lm_head.weight'.*tie_word_embeddings"
    ):
        open_directory(tmp_path)
    checkpoint = open_directory(tmp_path, json_model_override_args='{"tie_word_embeddings": true}')
    assert checkpoint.config.tie_word_embeddings


def test_a_tied_model_may_bring_a_head(tmp_path: Path) -> None:
    untied = TinyCheckpoint()
    write_weights(tmp_path, untied.tensors(), 1, "safetensors")
    write_json(tmp_path / "config.json", untied.config_values | {"tie_word_embeddings": True})
    assert "lm_head.weight" in open_directory(tmp_path).tensor_names


def test_a_tied_model_may_have_only_the_head(tmp_path: Path) -> None:
    tied = TinyCheckpoint(config={"tie_word_embeddings": True})
    tensors = tied.tensors()
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_weights(tmp_path, tensors, 1, "safetensors")
    write_json(tmp_path / "config.json", tied.config_values)
    assert "lm_head.weight" in open_directory(tmp_path).tensor_names


def shard_paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    TinyCheckpoint(num_shards=3).write(tmp_path)
    shard_paths(tmp_path)[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is missing"):
        open_directory(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: float) -> None:
    TinyCheckpoint(num_shards=3).write(tmp_path)
    path = shard_paths(tmp_path)[1]
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is truncated"):
        open_directory(tmp_path)


def test_the_truncated_tensor_is_named(tmp_path: Path) -> None:
    path = TinyCheckpoint(num_shards=3).write(tmp_path) and shard_paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    last = max(
        (entry["data_offsets"][1], name)
        for name, entry in json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}").items()
        if name != "__metadata__"
    )[1]
    with pytest.raises(CheckpointError, match=f"tensor '{last}' ends at byte"):
        open_directory(tmp_path)


def edit_index(directory: Path, **entries: str | None) -> None:
    path = directory / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    values["weight_map"] |= entries
    values["weight_map"] = {k: v for k, v in values["weight_map"].items() if v is not None}
    write_json(path, values)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"model.extra": "model-00001-of-00002.safetensors"},
            r"index.json puts tensor 'model.extra' in model-00001.*does not hold it",
        ),
        ({"model.norm.weight": None}, r"holds tensor 'model.norm.weight', which .* puts nowhere"),
        ({"model.extra": "../other.safetensors"}, "not a plain file name"),
        ({"model.extra": "model-00003.safetensors"}, r"model-00003.safetensors is missing"),
    ],
)
def test_an_index_that_disagrees_is_named(
    tmp_path: Path, entries: dict[str, str | None], message: str
) -> None:
    TinyCheckpoint(num_shards=2).write(tmp_path)
    edit_index(tmp_path, **entries)
    with pytest.raises(CheckpointError, match=message):
        open_directory(tmp_path)


@pytest.mark.parametrize("weight_format", ["safetensors", "pt"])
def test_a_tensor_in_two_shards_is_named(tmp_path: Path, weight_format: str) -> None:
    tiny = TinyCheckpoint(num_shards=2, weight_format=weight_format)
    tiny.write(tmp_path)
    single, pattern = {
        "safetensors": ("model.safetensors", "model-*"),
        "pt": ("pytorch_model.bin", "pytorch_model-*"),
    }[weight_format]
    (tmp_path / f"{single}.index.json").unlink()
    first = sorted(tmp_path.glob(pattern))[0]
    first.with_name(first.name.replace("00001", "00000")).write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"is both in .*00000.* and in .*00001"):
        list(open_directory(tmp_path).tensors())


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"a": ', "not valid JSON"), (b"\xff\xfe\x00", "not valid JSON"), (b"[1]", "not an object")],
)
def test_unreadable_json_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    TinyCheckpoint().write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} .*{message}"):
        open_directory(tmp_path)


def test_an_unreadable_index_is_named(tmp_path: Path) -> None:
    TinyCheckpoint(num_shards=2).write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match=r"index.json: weight_map must map"):
        open_directory(tmp_path)


def test_a_garbled_header_is_named(tmp_path: Path) -> None:
    path = TinyCheckpoint().write(tmp_path) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[9] = 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors: the header is not valid JSON"):
        open_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 32}, r"'model.embed_tokens.weight' has shape \[320, 64\].*\[320, 32\]"),
        ({"num_hidden_layers": 4}, r"lacks tensors 'model.layers.3.\S+', .*and 4 more"),
        ({"num_hidden_layers": 2}, r"has tensors 'model.layers.2.\S+', .*LlamaForCausalLM"),
        ({"vocab_size": 321}, r"'lm_head.weight'|'model.embed_tokens.weight' has shape"),
    ],
)
@pytest.mark.parametrize("weight_format", ["safetensors", "pt"])
def test_a_config_that_does_not_fit_the_weights_is_refused(
    tmp_path: Path, config: dict[str, int], message: str, weight_format: str
) -> None:
    tiny = TinyCheckpoint(weight_format=weight_format)
    write_json(tiny.write(tmp_path) / "config.json", tiny.config_values | config)
    with pytest.raises(CheckpointError, match=message):
        list(open_directory(tmp_path).tensors())


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    path = TinyCheckpoint().write(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has dtype I8; supported"):
        open_directory(tmp_path)


@pytest.mark.parametrize("weight_format", ["safetensors", "pt"])
def test_derived_buffers_and_other_formats_are_left_out(tmp_path: Path, weight_format: str) -> None:
    tiny = TinyCheckpoint(weight_format=weight_format)
    tiny.write(tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    write_weights(tmp_path, tiny.tensors() | buffer, 1, weight_format)
    save_file({"tok_embeddings.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    options = {"load_format": weight_format}
    assert_same(open_directory(tmp_path, **options), tiny.tensors())


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("executed",))


def test_a_pickle_that_runs_code_is_not_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TinyCheckpoint(weight_format="pt").write(tmp_path)
    torch.save({"model.norm.weight": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin holds more than tensors"):
        list(open_directory(tmp_path).tensors())
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_a_truncated_pytorch_file_is_named(tmp_path: Path, keep: float) -> None:
    path = TinyCheckpoint(weight_format="pt").write(tmp_path) / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        list(open_directory(tmp_path).tensors())


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "pt"])
def test_a_directory_without_weights_is_refused(tmp_path: Path, load_format: str) -> None:
    write_json(tmp_path / "config.json", TinyCheckpoint().config_values)
    with pytest.raises(CheckpointError, match="has no weights"):
        open_directory(tmp_path, load_format=load_format)
