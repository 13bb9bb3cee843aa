"""config.json and generation_config.json, in old and new spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import (
    FAMILIES,
    LLAMA3_ROPE,
    YARN_ROPE,
    TinyCheckpoint,
    split_experts,
    write_json,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.models.config import DecoderConfig, RopeConfig
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.config_json import parse_config
from trunkline.engine.weights.generation_config import parse_generation
from trunkline.engine.weights.layout import expected_tensors


def parse(family: str = "llama", **values: Any) -> DecoderConfig:
    return parse_config(TinyCheckpoint(family=family, config=values).config_values, "config.json")


def new_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 writes it."""
    new = dict(values)
    new["dtype"] = new.pop("torch_dtype")
    rope = new.pop("rope_scaling", None) or {"rope_type": "default"}
    new["rope_parameters"] = rope | {"rope_theta": new.pop("rope_theta")}
    return new


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_scaling": LLAMA3_ROPE},
        {"rope_scaling": YARN_ROPE},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {"sliding_window": None},
        {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-6},
        {"attention_bias": True, "mlp_bias": True},
        {"mlp_only_layers": [1, 2]},
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_mean_what_transformers_takes_them_for(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    if family == "gemma3" and "type" in (config.get("rope_scaling") or {}):
        pytest.skip("transformers does not read this family's older spelling")
    values = TinyCheckpoint(family=family, config=config).config_values
    old, new = parse_config(values, "old"), parse_config(new_spelling(values), "new")
    assert old == new
    write_json(tmp_path / "config.json", values)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert old.vocab_size == theirs.vocab_size
    assert old.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None)
    assert old.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    assert old.tie_word_embeddings == theirs.tie_word_embeddings
    assert old.rms_norm_eps == theirs.rms_norm_eps
    assert old.dtype == str(theirs.dtype).removeprefix("torch.")
    assert expected_tensors(old) == their_tensors(theirs)
    assert sliding_layers(old) == their_sliding_layers(theirs)
    rope = theirs.rope_parameters
    if "full_attention" in rope:
        assert old.sliding_rope is not None
        assert old.sliding_rope.theta == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    assert old.rope.theta == rope["rope_theta"]
    assert old.rope.kind == rope["rope_type"]
    assert old.rope.factor == rope.get("factor", 1.0)


def their_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in split_experts(state).items()}


def sliding_layers(config: DecoderConfig) -> list[int | None]:
    layers = config.sliding_layers or (True,) * config.num_layers
    return [config.sliding_window if slides else None for slides in layers]


def their_sliding_layers(config: Any) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_that_transformers_writes_means_the_same(tmp_path: Path, family: str) -> None:
    values = TinyCheckpoint(family=family).config_values
    write_json(tmp_path / "config.json", values)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written
    assert parse_config(written, "config.json") == parse_config(values, "config.json")


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, RopeConfig()),
        ({"rope_type": "default"}, RopeConfig()),
        ({"type": "linear", "factor": 2}, RopeConfig(kind="linear", factor=2.0)),
        (
            LLAMA3_ROPE,
            RopeConfig(kind="llama3", factor=8.0, original_max_position=64),
        ),
        (
            YARN_ROPE | {"beta_fast": 16, "attention_factor": 0.9},
            RopeConfig(
                kind="yarn",
                factor=4.0,
                original_max_position=128,
                beta_fast=16.0,
                attention_factor=0.9,
            ),
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 128},
            RopeConfig(kind="yarn", factor=4.0, original_max_position=128),
        ),
    ],
)
def test_rope(rope: dict[str, Any] | None, expected: RopeConfig) -> None:
    assert parse(rope_scaling=rope).rope == expected


def test_yarn_factor_from_mscale() -> None:
    rope = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2}
    values = TinyCheckpoint(config={"rope_scaling": rope}).config_values
    theirs = AutoConfig.for_model(**new_spelling(values))
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert parse_config(values, "config.json").rope.attention_factor == pytest.approx(factor)


def test_rope_parameters_by_layer_type() -> None:
    same = {"rope_type": "default", "rope_theta": 5.0}
    per_type = {"full_attention": same, "sliding_attention": dict(same)}
    assert parse(rope_parameters=per_type).rope.theta == 5.0
    per_type["sliding_attention"] = same | {"rope_theta": 6.0}
    with pytest.raises(CheckpointError, match="the same for every layer type"):
        parse(rope_parameters=per_type)


def test_layer_types_say_where_the_window_is() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = parse("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=8)
    assert (config.sliding_window, config.sliding_layers) == (8, (True, False, True))


# What the published files of Gemma-2 say of the architecture, and that they leave the rest out.
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "vocab_size": 256000,
}


def test_gemma2_has_its_defaults() -> None:
    config = parse_config(GEMMA2_2B, "config.json")
    spelt_out = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
    assert parse_config(GEMMA2_2B | spelt_out, "config.json") == config
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert (config.attention_scale, config.embedding_scale) == (1 / 16, 48.0)
    assert (config.norm_offset, config.post_norms, config.hidden_act) == (1.0, True, "gelu_tanh")
    assert (config.sliding_window, config.head_dim) == (4096, 256)
    assert config.sliding_layers == (True, False) * 13
    assert config.tie_word_embeddings
    assert config.rms_norm_eps == 1e-6


def test_gemma2_without_caps_and_with_another_scale() -> None:
    changes = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 144,
        "tie_word_embeddings": False,
    }
    config = parse_config(GEMMA2_2B | changes, "config.json")
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
    assert config.attention_scale == 1 / 12
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping = 0.* above 0, or null"),
        ({"final_logit_softcapping": -3.0}, "final_logit_softcapping = -3.0.* above 0, or null"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping = '30'.*a number"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0.* above 0"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'.*silu, gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True.* false"),
    ],
)
def test_what_gemma2_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse("gemma2", **values)


# The same of Gemma-3, 1B.
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "vocab_size": 262144,
}


def test_gemma3_has_its_defaults() -> None:
    config = parse_config(GEMMA3_1B, "config.json")
    spelt_out = {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
    assert parse_config(GEMMA3_1B | spelt_out, "config.json") == config
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
    assert (config.rope, config.sliding_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert config.sliding_layers == ((True,) * 5 + (False,)) * 4 + (True,) * 2
    assert config.qk_norm
    assert config.attention_scale == 1 / 16


def test_gemma3_scales_the_rope_of_layers_without_a_window_only() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    expected = RopeConfig(kind="linear", theta=1e6, factor=8.0)
    config = parse_config(GEMMA3_1B | {"rope_scaling": linear}, "config.json")
    assert (config.rope, config.sliding_rope) == (expected, RopeConfig(theta=1e4))
    sliding = {"rope_type": "default", "rope_theta": 7.0}
    ropes = {"full_attention": linear, "sliding_attention": sliding}
    config = parse_config(GEMMA3_1B | {"rope_parameters": ropes}, "config.json")
    assert (config.rope, config.sliding_rope) == (expected, RopeConfig(theta=7.0))
    ropes["sliding_attention"] = "default"  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"rope_parameters\.sliding_attention = 'default'"):
        parse_config(GEMMA3_1B | {"rope_parameters": ropes}, "config.json")


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", None])
def test_gelu_of_old_gemma_files_is_the_one_by_tanh(name: str | None) -> None:
    values = TinyCheckpoint(family="gemma").config_values
    del values["hidden_act"]
    given = values if name is None else values | {"hidden_act": name}
    assert parse_config(given, "config.json").hidden_act == "gelu_tanh"


def test_caps_are_no_other_familys() -> None:
    config = parse("llama", attn_logit_softcapping=5.0, final_logit_softcapping=5.0)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)


SCHEME = {
    "dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float",
}  # fmt: skip
PER_HEAD = SCHEME | {"strategy": "attn_head"}
COMPRESSED = {
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def test_scales_of_keys_and_values() -> None:
    config = parse(quantization_config=COMPRESSED)
    assert config.kv_scales
    added = expected_tensors(config).keys() - expected_tensors(parse()).keys()
    names = {f"model.layers.{layer}.self_attn" for layer in range(config.num_layers)}
    assert added == {f"{name}.{part}" for name in names for part in ("k_scale", "v_scale")}
    assert not parse(quantization_config=COMPRESSED | {"kv_cache_scheme": None}).kv_scales


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, r"architectures = \['BloomForCausalLM'\].*Llama"),
        ({"architectures": None}, "architectures = None is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type = 'dynamic'.*llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor as a positive number"),
        ({"rope_scaling": YARN_ROPE | {"truncate": False}}, "truncate of rope_type yarn = False"),
        ({"rope_theta": "1e4"}, "needs rope_theta as a positive number, not '1e4'"),
        ({"rope_scaling": [1]}, "rope_parameters = .* an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq'.*GGUF files"),
        (
            {"quantization_config": COMPRESSED | {"config_groups": {"group_0": {}}}},
            "quant_method = 'compressed-tensors'.*nothing but keys and values",
        ),
        (
            {"quantization_config": COMPRESSED | {"kv_cache_scheme": {"type": "int"}}},
            "kv_cache_scheme.type = 'int' is not supported; supported: 'float'",
        ),
        (
            {"quantization_config": COMPRESSED | {"kv_cache_scheme": PER_HEAD}},
            "kv_cache_scheme.strategy = 'attn_head'.*'tensor'",
        ),
        ({"torch_dtype": "float64"}, "dtype = 'float64' is not supported; supported: float32"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"hidden_size": "64"}, "hidden_size = '64' is not supported; supported: an integer"),
        ({"hidden_size": -1}, "hidden_size = -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000.*from 1 to 10000"),
        ({"vocab_size": 2**31}, "vocab_size = 2147483648"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'.*a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'.*true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of .* 3"),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        parse(**values)
    assert str(error.value).startswith("config.json")


def test_wrong_layer_types_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"layer_types = .*3 of sliding_attention"):
        parse("mistral", layer_types=["chunked_attention"] * 3)


@pytest.mark.parametrize(
    ("generation", "config", "eos", "sampling"),
    [
        ({}, {}, (), {}),
        ({}, {"eos_token_id": 2}, (2,), {}),
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 2}, (2, 5, 7), {}),
        ({"eos_token_id": None}, {"eos_token_id": [3, 3]}, (3,), {}),
        (
            {"temperature": 0.01, "top_k": 5, "top_p": None, "do_sample": True, "max_length": 20},
            {},
            (),
            {"temperature": 0.01, "top_k": 5},
        ),
        (
            {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
            {},
            (),
            {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
        ),
    ],
)
def test_generation_defaults(
    generation: dict[str, Any],
    config: dict[str, Any],
    eos: tuple[int, ...],
    sampling: dict[str, float],
) -> None:
    found = parse_generation(generation, config, "model")
    assert found.eos_token_ids == eos
    assert found.sampling == sampling


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be token ids"),
        ({"temperature": "hot"}, "temperature of generation_config.json is 'hot'"),
        ({"top_k": True}, "top_k of generation_config.json is True"),
    ],
)
def test_wrong_generation_values_are_named(generation: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_generation(generation, {}, "model")


def test_stop_ids_are_those_of_all_three_files(tmp_path: Path) -> None:
    directory = TinyCheckpoint(config={"eos_token_id": 6}).write(tmp_path)
    checkpoint = open_checkpoint(ModelOptions(model_path=str(directory)))
    assert checkpoint.generation.eos_token_ids == (2, 6)  # 2: the tokenizer's
    write_json(directory / "generation_config.json", {"eos_token_id": [8, 9]})
    checkpoint = open_checkpoint(ModelOptions(model_path=str(directory)))
    assert checkpoint.generation.eos_token_ids == (2, 6, 8, 9)


def test_stop_ids_without_a_tokenizer(tmp_path: Path) -> None:
    directory = TinyCheckpoint(with_tokenizer=False).write(tmp_path)
    checkpoint = open_checkpoint(ModelOptions(model_path=str(directory)))
    assert checkpoint.generation.eos_token_ids == (2,)
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing"):
        _ = checkpoint.tokenizer
