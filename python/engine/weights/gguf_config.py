"""GGUF's metadata and tensor names in Hugging Face's spelling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trunkline.engine.checkpoint import CheckpointError, GenerationDefaults
from trunkline.engine.weights.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"  # llama3 scaling: one divisor per inverse frequency


@dataclass(frozen=True, slots=True)
class _Architecture:
    name: str  # Hugging Face's
    # The llama converter interleaves the two halves of each head in q and k.
    permuted: bool


ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", permuted=False),
    "qwen3": _Architecture("Qwen3ForCausalLM", permuted=False),
}

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_STOP_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hugging_face_name(name: str) -> str | None:
    """The tensor's name in Hugging Face's spelling, None if there is no such tensor."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_PER_LAYER[part]}.{kind}" if part in _PER_LAYER else None
    part, _, kind = name.rpartition(".")
    return f"{_TOP_LEVEL[part]}.{kind}" if part in _TOP_LEVEL and kind == "weight" else None


def is_permuted(architecture: str, name: str) -> bool:
    """Whether the rows of this GGUF tensor are in the llama converter's order."""
    match = _LAYER_TENSOR.fullmatch(name)
    permuted = ARCHITECTURES[architecture].permuted
    return permuted and match is not None and match[2] in ("attn_q", "attn_k")


def config_values(file: GgufFile) -> dict[str, Any]:
    """The metadata as the values of a `config.json`.

    Raises:
        CheckpointError: an architecture, rope scaling or feature that is not supported, or a key
            that is missing.
    """
    metadata = _Metadata(file)
    heads = metadata.integer("attention.head_count")
    hidden = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // heads)
    metadata.require("attention.value_length", head_dim)
    metadata.require("rope.dimension_count", head_dim)
    metadata.require("expert_count", 0)
    window = metadata.integer("attention.sliding_window", 0)
    architecture = ARCHITECTURES[metadata.architecture].name
    if window and architecture == "LlamaForCausalLM":
        architecture = "MistralForCausalLM"  # the llama with a window
    return {
        "architectures": [architecture],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "dtype": "bfloat16",
        "rope_parameters": _rope(metadata),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def frequency_factors(file: GgufFile) -> tuple[float, ...]:
    """Divisors of the inverse rope frequencies (llama3 scaling), empty if there are none."""
    if ROPE_FACTORS not in file.tensors:
        return ()
    return tuple(file.read(ROPE_FACTORS).ravel().tolist())


def read_generation(file: GgufFile) -> GenerationDefaults:
    """Stop ids (end of sequence, of turn, of message) and recommended sampling of the metadata."""
    ids = {
        file.metadata[key]
        for name in _STOP_IDS
        if (key := f"tokenizer.ggml.{name}") in file.metadata
    }
    sampling = {ours: file.metadata[key] for key, ours in _SAMPLING.items() if key in file.metadata}
    return GenerationDefaults(eos_token_ids=tuple(sorted(ids)), sampling=sampling)


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks tensor 'token_embd.weight'")
    return embedding.shape[0]


def _rope(metadata: _Metadata) -> dict[str, Any]:
    kind = metadata.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{metadata.file.path}: rope scaling {kind!r} is not supported; "
            "none, linear and yarn are"
        )
    theta = metadata.get("rope.freq_base", 10_000.0)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    rope = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": metadata.get("rope.scaling.factor"),
    }
    if kind == "yarn":
        metadata.require("rope.scaling.attn_factor", 1.0)
        rope |= {
            "original_max_position_embeddings": metadata.integer(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    return rope


_REQUIRED = object()


class _Metadata:
    """The architecture's own keys, without their prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = str(file.metadata.get("general.architecture"))
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {architecture!r} is not supported; "
                f"{', '.join(ARCHITECTURES)} are"
            )
        self.architecture = architecture

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self.file.path} lacks the metadata key {full!r}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.file.path}: {full} differs between layers, which is not supported"
                )
            value = value[0]
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.get(key, default)
        if not isinstance(value, int):
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} is {value!r}, not an integer"
            )
        return value

    def require(self, key: str, supported: float) -> None:
        value = self.get(key, supported)
        if value != supported:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} = {value!r} is not supported; "
                f"{supported!r} is"
            )
