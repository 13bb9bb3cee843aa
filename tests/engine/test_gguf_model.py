"""Models in GGUF files: configuration, tensors under their Hugging Face names, dequantisation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.checkpoints import LLAMA3_ROPE
from tests.gguf_files import ARCHITECTURES, TinyGguf
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trunkline.engine.checkpoint import Checkpoint, CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.models.config import RopeConfig
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.config_json import parse_config
from trunkline.engine.weights.default_model import default_model_path
from trunkline.engine.weights.gguf_config import config_values
from trunkline.engine.weights.gguf_file import GgufFile


def open_tiny(path: Path, tiny: TinyGguf, **options: str) -> Checkpoint:
    tiny.write(path)
    return open_checkpoint(ModelOptions(model_path=str(path), **options))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_tensors_are_those_written(tmp_path: Path, family: str, kind: str) -> None:
    tiny = TinyGguf(family=family, kind=kind)
    expected = tiny.write(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(ModelOptions(model_path=str(tmp_path / "tiny.gguf")))
    found = dict(checkpoint.tensors())
    assert found.keys() == expected.keys() == checkpoint.tensor_names
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_config_is_that_of_the_same_model_in_hugging_face_format(
    tmp_path: Path, family: str, tied: bool
) -> None:
    tiny = TinyGguf(family=family, config={"tie_word_embeddings": tied})
    config = open_tiny(tmp_path / "tiny.gguf", tiny).config
    expected = parse_config(tiny.source.config_values, "config.json")
    # GGUF brings llama3 scaling as divisors, which these files do not have, and no dtype.
    rope = replace(config.rope, theta=expected.rope.theta) if family == "llama3" else expected.rope
    assert config == replace(expected, dtype="bfloat16", rope=rope)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q8_0"),
        ("qwen2", "F16"),
        ("qwen3", "Q4_1"),
        ("gemma2", "Q8_0"),
        ("gemma3", "Q4_0"),
    ],
)
def test_agrees_with_transformers(tmp_path: Path, family: str, kind: str) -> None:
    # transformers does not read the head size of GGUF's qwen3: it must be the family's default
    config = {"head_dim": 128} if family == "qwen3" else {}
    tiny = TinyGguf(family=family, kind=kind, config=config)
    checkpoint = open_tiny(tmp_path / "tiny.gguf", tiny)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    state = model.state_dict()
    for name, tensor in checkpoint.tensors():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("family", "layers", "scalar"),
    [("gemma2", 26, 256), ("gemma2", 42, 256), ("gemma2", 46, 144), ("gemma3", 62, 144)],
)
def test_what_gemma_files_leave_out(tmp_path: Path, family: str, layers: int, scalar: int) -> None:
    """27B is the one whose queries are not scaled by the size of a head."""
    metadata: dict[str, Any] = {
        "block_count": layers,
        "embedding_length": 4608,
        "attention.head_count": 32,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "rope.dimension_count": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention.sliding_window": None,
        "attention.sliding_window_pattern": None,
        "rope.freq_base_swa": None,
    }
    metadata = {f"{family}.{key}": value for key, value in metadata.items()}
    TinyGguf(family=family, metadata=metadata).write(tmp_path / "tiny.gguf")
    values = config_values(GgufFile(tmp_path / "tiny.gguf"))
    assert values["query_pre_attn_scalar"] == scalar
    config = parse_config(values, "tiny.gguf")
    caps, period = ((50.0, 30.0), 2) if family == "gemma2" else ((None, None), 6)
    assert (config.attention_soft_cap, config.logit_soft_cap) == caps
    assert config.sliding_window == 4096
    assert config.sliding_layers == tuple((layer + 1) % period != 0 for layer in range(layers))
    if family == "gemma3":
        assert config.sliding_rope == RopeConfig(theta=10_000.0)
        assert config.rope == RopeConfig(kind="linear", theta=1_000_000.0, factor=8.0)


def test_the_sentencepiece_tokenizer_of_gemma2_files_is_refused(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    checkpoint = open_tiny(tmp_path / "tiny.gguf", TinyGguf(family="gemma2", metadata=metadata))
    with pytest.raises(CheckpointError, match=r"kind 'llama' is not supported.*--tokenizer-path"):
        _ = checkpoint.tokenizer


def write_llama3_factors(tiny: TinyGguf, path: Path) -> torch.Tensor:
    """Add the divisors that llama.cpp's converter derives from llama3 scaling to a written file."""
    values = {**tiny.source.config_values, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**values))
    plain = 1.0 / 5e5 ** (torch.arange(0, tiny.head_dim, 2).float() / tiny.head_dim)
    factors = plain / scaled
    tiny.write(path, extra={"rope_freqs.weight": factors.numpy()})
    return factors


def test_llama3_scaling_comes_as_frequency_factors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    factors = write_llama3_factors(TinyGguf(family="llama3"), path)
    checkpoint = open_checkpoint(ModelOptions(model_path=str(path)))
    rope = checkpoint.config.rope
    assert rope.kind == "factors"
    assert rope.theta == 500_000.0
    assert rope.frequency_factors == tuple(factors.tolist())
    assert max(rope.frequency_factors) == pytest.approx(8.0)
    assert not any("rope" in name for name in checkpoint.tensor_names)


@pytest.mark.parametrize(
    ("factors", "metadata", "message"),
    [
        ([1.0] * 7, {}, "7 values in 'rope_freqs.weight' with rope scaling 'default'"),
        ([0.0] * 8, {}, "'rope_freqs.weight' has values that are not positive"),
        ([float("nan")] * 8, {}, "'rope_freqs.weight' has values that are not positive"),
        (
            [1.0] * 8,
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            "with rope scaling 'linear'",
        ),
    ],
)
def test_frequency_factors_that_do_not_fit_are_refused(
    tmp_path: Path, factors: list[float], metadata: dict[str, Any], message: str
) -> None:
    path = tmp_path / "tiny.gguf"
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    TinyGguf(metadata=metadata).write(path, extra=extra)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(ModelOptions(model_path=str(path)))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"kind": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            {"kind": "yarn", "factor": 4.0, "original_max_position": 128, "beta_fast": 32.0},
        ),
        ({"llama.rope.scaling.type": "none"}, {"kind": "default"}),
        ({"llama.rope.freq_base": None}, {"theta": 10_000.0}),
    ],
)
def test_rope_metadata(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = open_tiny(tmp_path / "tiny.gguf", TinyGguf(metadata=metadata)).config.rope
    assert {key: getattr(rope, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "bloom"}, "architecture 'bloom' is not supported; llama, qwen2"),
        ({"llama.context_length": None}, "lacks the metadata key 'llama.context_length'"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is not supported; 16 is"),
        ({"llama.attention.value_length": 8}, "value_length = 8 is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama.attention.head_count": [4, 4, 2]}, "head_count differs between layers"),
        ({"llama.block_count": "3"}, "'llama.block_count' is '3', not of type int"),
        ({"llama.block_count": 4}, r"lacks tensors 'model.layers.3.\S+"),
        ({"llama.block_count": 2}, r"has tensors 'model.layers.2.\S+"),
        ({"llama.embedding_length": 32}, "has shape"),
        ({"split.count": 3}, "one of 3 parts; merge them"),
    ],
)
def test_unsupported_metadata_is_named(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_tiny(tmp_path / "tiny.gguf", TinyGguf(metadata=metadata))


def test_values_that_are_equal_in_all_layers_are_one(tmp_path: Path) -> None:
    tiny = TinyGguf(metadata={"llama.attention.head_count_kv": [2, 2, 2]})
    assert open_tiny(tmp_path / "tiny.gguf", tiny).config.num_kv_heads == 2


def test_a_window_makes_a_mistral(tmp_path: Path) -> None:
    tiny = TinyGguf(metadata={"llama.attention.sliding_window": 24})
    config = open_tiny(tmp_path / "tiny.gguf", tiny).config
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 24)


def test_overrides_are_in_the_spelling_of_a_config_json(tmp_path: Path) -> None:
    config = open_tiny(
        tmp_path / "tiny.gguf",
        TinyGguf(),
        json_model_override_args='{"max_position_embeddings": 99, "rms_norm_eps": 0.5}',
    ).config
    assert (config.max_position, config.rms_norm_eps) == (99, 0.5)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    TinyGguf().write(tmp_path / "tiny.gguf", leave_out=name)
    with pytest.raises(CheckpointError, match=r"lacks tensor"):
        open_checkpoint(ModelOptions(model_path=str(tmp_path / "tiny.gguf")))


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}
    TinyGguf().write(tmp_path / "tiny.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.ffn_gate_inp.weight', for which"):
        open_checkpoint(ModelOptions(model_path=str(tmp_path / "tiny.gguf")))


def test_generation_defaults(tmp_path: Path) -> None:
    tiny = TinyGguf(
        metadata={
            "tokenizer.ggml.eot_token_id": 4,
            "general.sampling.temp": 0.7,
            "general.sampling.top_k": 20,
        }
    )
    generation = open_tiny(tmp_path / "tiny.gguf", tiny).generation
    assert generation.eos_token_ids == (2, 4)
    assert generation.sampling == {"temperature": 0.7, "top_k": 20}


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def q4_k_block(raw: bytes) -> list[float]:
    """One block of Q4_K by its definition: 8 groups of 32, each with a 6-bit scale and minimum."""
    scale, minimum, packed, quants = half(raw[:2]), half(raw[2:4]), raw[4:16], raw[16:]
    values = []
    for group in range(8):
        if group < 4:
            factor, offset = packed[group] & 63, packed[group + 4] & 63
        else:
            factor = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            offset = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for index in range(32):
            byte = quants[32 * (group // 2) + index]
            quant = byte >> 4 if group % 2 else byte & 15
            values.append(scale * factor * quant - minimum * offset)
    return values


def q6_k_block(raw: bytes) -> list[float]:
    """One block of Q6_K by its definition: 16 groups of 16 with an 8-bit scale."""
    low, high, scales, scale = raw[:128], raw[128:192], raw[192:208], half(raw[208:])
    values = []
    for position in range(256):
        part, rest = divmod(position, 128)
        quarter, column = divmod(rest, 32)
        nibble = low[64 * part + 32 * (quarter % 2) + column] >> (4 if quarter >= 2 else 0) & 15
        top = high[32 * part + column] >> (2 * quarter) & 3
        factor = int(np.int8(np.uint8(scales[position // 16])))
        values.append(scale * factor * ((nibble | top << 4) - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "scales_at", "block"),
    [("Q4_K", (0, 2), q4_k_block), ("Q6_K", (208,), q6_k_block)],
)
def test_k_quants_are_dequantised_by_their_definition(
    tmp_path: Path, kind: str, scales_at: tuple[int, ...], block: Any
) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    generator = np.random.default_rng(3)
    raw = generator.integers(0, 256, (5, block_bytes), np.uint8)
    for at in scales_at:
        raw[:, at : at + 2] = generator.random((5, 1)).astype(np.float16).view(np.uint8)
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("matrix", raw, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(path).read("matrix")
    assert found.shape == (5, 256)
    expected = np.array([block(row.tobytes()) for row in raw])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def default_model_differences(names: set[str] | None) -> list[str]:
    path = default_model_path()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    state = model.state_dict()
    checkpoint = open_checkpoint(ModelOptions())
    assert state.keys() - {"lm_head.weight"} == checkpoint.tensor_names
    return [
        name
        for name, tensor in checkpoint.tensors()
        if (names is None or name in names) and not torch.equal(state[name], tensor)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_default_model_agrees_with_transformers() -> None:
    assert default_model_differences(None) == []


def test_tensors_of_the_default_model_are_dequantised_by_their_definition() -> None:
    file = GgufFile(default_model_path())
    raw = file.path.read_bytes()
    tensor = file.tensors["blk.7.attn_v.weight"]
    assert tensor.kind.name == "Q4_1"
    found = file.read(tensor.name)
    blocks_per_row = tensor.shape[1] // 32
    for row, block in [(0, 0), (3, 5), (191, 17)]:
        start = tensor.offset + 20 * (row * blocks_per_row + block)
        scale, minimum = half(raw[start : start + 2]), half(raw[start + 2 : start + 4])
        quants = raw[start + 4 : start + 20]
        nibbles = [byte & 15 for byte in quants] + [byte >> 4 for byte in quants]
        expected = np.array([scale * nibble + minimum for nibble in nibbles], np.float32)
        np.testing.assert_allclose(found[row, 32 * block : 32 * block + 32], expected, rtol=1e-6)
