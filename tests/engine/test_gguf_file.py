"""The GGUF container: what the `gguf` package writes is read back; damage is named."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.gguf_files import TinyGguf

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.gguf_file import GgufFile


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    TinyGguf(kind="Q4_0").write(path)
    return path


def test_agrees_with_the_reader_of_the_gguf_package(path: Path) -> None:
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for name, field in fields.items():
        expected = field.contents()
        if isinstance(expected, float):
            assert np.float32(ours.metadata[name]) == np.float32(expected)
        else:
            assert ours.metadata[name] == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        found = ours.read(tensor.name)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.dtype == np.float32
        assert np.array_equal(found, values.reshape(found.shape))


def test_what_was_released_is_read_again(path: Path) -> None:
    ours = GgufFile(path)
    before = {name: ours.read(name) for name in ours.tensors}
    views = {name: ours.read_rows(name) for name in ours.tensors}
    copies = {name: rows.copy() for name, rows in views.items()}
    for name in ours.tensors:
        ours.release(name)
    for name in ours.tensors:
        assert np.array_equal(views[name], copies[name])
        assert np.array_equal(ours.read(name), before[name])


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -5)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Grüße 👋")
    writer.add_array("texts", ["a", "", "ß"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_custom_alignment(64)
    writer.add_tensor("odd", np.arange(3, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.metadata == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -5,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 1e-5,
        "f64": 0.1,
        "yes": True,
        "text": "Grüße 👋",
        "texts": ["a", "", "ß"],
        "numbers": [1, -2, 3],
        "flags": [True, False],
        "general.alignment": 64,
    }
    assert file.read("odd").tolist() == [0, 1, 2]
    assert file.read("matrix").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_is_read_does_not_depend_on_the_file(path: Path) -> None:
    values = GgufFile(path).read("output_norm.weight")
    assert values.flags.writeable
    values += 1


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_named(path: Path, tmp_path: Path, share: float) -> None:
    content = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"cut.gguf"):
        GgufFile(cut)


def test_the_truncated_tensor_is_named(path: Path, tmp_path: Path) -> None:
    last = max(GgufFile(path).tensors.values(), key=lambda tensor: tensor.offset)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: last.offset + last.num_bytes - 1])
    with pytest.raises(CheckpointError, match=f"truncated: tensor '{last.name}' ends at byte"):
        GgufFile(cut)


def header(content: bytes) -> Callable[[int, str, int], bytes]:
    def patched(offset: int, layout: str, value: int) -> bytes:
        changed = bytearray(content)
        struct.pack_into(layout, changed, offset, value)
        return bytes(changed)

    return patched


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "<I", 0x46554746, "not a GGUF file"),
        (4, "<I", 1, "GGUF version 1; supported are 2 and 3"),
        (4, "<I", 0x03000000, "GGUF version 50331648.*little-endian"),
        (8, "<Q", 2**63, "truncated|unknown"),
        (16, "<Q", 2**63, "truncated|unknown|UTF-8"),
        (24, "<Q", 2**62, "truncated"),
    ],
)
def test_a_wrong_header_is_named(
    path: Path, tmp_path: Path, offset: int, layout: str, value: int, message: str
) -> None:
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(header(path.read_bytes())(offset, layout, value))
    with pytest.raises(CheckpointError, match=message):
        GgufFile(changed)


ALL_METADATA = {
    "tokenizer.chat_templates": ["tool_use"],
    "tokenizer.chat_template.tool_use": "with tools",
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.padding_token_id": 3,
    "tokenizer.ggml.eot_token_id": 4,
    "general.sampling.temp": 0.5,
    "general.alignment": 32,
    "split.count": 1,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 100,
    "llama.rope.scaling.yarn_beta_fast": 20.0,
    "llama.attention.sliding_window": 8,
}


def open_everything(path: Path) -> None:
    checkpoint = open_checkpoint(ModelOptions(model_path=str(path)))
    checkpoint.tokenizer.encode("The quick brown fox")
    assert checkpoint.generation.eos_token_ids
    assert checkpoint.chat_template.exists
    for _ in checkpoint.tensors():
        pass


def test_metadata_of_the_wrong_type_is_a_checkpoint_error_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "changed.gguf"
    tiny = TinyGguf(metadata=ALL_METADATA)
    tiny.write(path)
    open_everything(path)
    harmless = []
    for key in GgufFile(path).metadata.keys() - {"general.architecture"}:  # always text
        for wrong in ("text", -7.5, True, ["text"], [1.5], 0, 10**9):
            replace(tiny, metadata=ALL_METADATA | {key: wrong}).write(path)
            try:
                open_everything(path)
            except CheckpointError:
                continue
            harmless.append((key, wrong))
    assert ("tokenizer.ggml.tokens", "text") not in harmless
    assert ("llama.block_count", True) not in harmless


def test_random_damage_is_a_checkpoint_error_or_harmless(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    header_end = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    random_numbers = random.Random(7)
    changed = tmp_path / "changed.gguf"
    messages = []
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(random_numbers.randint(1, 4)):
            damaged[random_numbers.randrange(header_end)] = random_numbers.randrange(256)
        changed.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(ModelOptions(model_path=str(changed)))
            checkpoint.tokenizer.encode("The quick brown fox")
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all("changed.gguf" in message for message in messages)
