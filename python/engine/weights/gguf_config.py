"""GGUF's metadata and tensor names in Hugging Face's spelling."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trunkline.engine.checkpoint import CheckpointError, GenerationDefaults
from trunkline.engine.weights.gguf_file import GgufFile, Value

ROPE_FACTORS = "rope_freqs.weight"  # llama3 scaling: one divisor per inverse frequency


@dataclass(frozen=True, slots=True)
class _Architecture:
    name: str  # Hugging Face's
    # The llama converter interleaves the two halves of each head in q and k.
    permuted: bool = False
    # Gemma's converter adds to the weights of norms what its models multiply with besides.
    norm_offset: float = 0.0
    part_names: Mapping[str, str] = field(default_factory=dict)  # that differ from the others'
    is_later_gemma: bool = False  # Gemma-2 or newer
    # Of the one model of the family that scales its queries by another size than the head's.
    layers_of_largest: int | None = None
    sliding_theta: float | None = None  # layers with a window have a rope of their own


_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "gemma": _Architecture("GemmaForCausalLM", norm_offset=1.0),
    "gemma2": _Architecture(
        "Gemma2ForCausalLM",
        norm_offset=1.0,
        part_names=_POST_NORMS,
        is_later_gemma=True,
        layers_of_largest=46,
    ),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM",
        norm_offset=1.0,
        part_names=_POST_NORMS,
        is_later_gemma=True,
        layers_of_largest=62,
        sliding_theta=10_000.0,
    ),
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


def hugging_face_name(architecture: str, name: str) -> str | None:
    """The tensor's name in Hugging Face's spelling, None if there is no such tensor."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        parts = {**_PER_LAYER, **ARCHITECTURES[architecture].part_names}
        return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None
    part, _, kind = name.rpartition(".")
    return f"{_TOP_LEVEL[part]}.{kind}" if part in _TOP_LEVEL and kind == "weight" else None


def is_permuted(architecture: str, name: str) -> bool:
    """Whether the rows of this GGUF tensor are in the llama converter's order."""
    match = _LAYER_TENSOR.fullmatch(name)
    permuted = ARCHITECTURES[architecture].permuted
    return permuted and match is not None and match[2] in ("attn_q", "attn_k")


def norm_offset(architecture: str, name: str) -> float:
    """What the converter has added to every element of this GGUF tensor."""
    return ARCHITECTURES[architecture].norm_offset if name.endswith("norm.weight") else 0.0


def config_values(file: GgufFile) -> dict[str, Any]:
    """The metadata as the values of a `config.json`.

    Raises:
        CheckpointError: an architecture, rope scaling or feature that is not supported, or a key
            that is missing.
    """
    metadata = _Metadata(file)
    heads = metadata.size("attention.head_count")
    hidden = metadata.size("embedding_length")
    head_dim = metadata.size("attention.key_length", hidden // heads)
    metadata.require("attention.value_length", head_dim)
    metadata.require("rope.dimension_count", head_dim)
    metadata.require("expert_count", 0)
    window = metadata.get("attention.sliding_window", int, 0)
    architecture = ARCHITECTURES[metadata.architecture].name
    if window and architecture == "LlamaForCausalLM":
        architecture = "MistralForCausalLM"  # the llama with a window
    values = {
        "architectures": [architecture],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": metadata.size("context_length"),
        "dtype": "bfloat16",
        "rope_parameters": _rope(metadata),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }
    if ARCHITECTURES[metadata.architecture].is_later_gemma:
        del values["sliding_window"]
        values |= _later_gemma(metadata, hidden // heads, head_dim)
    return values


def _later_gemma(metadata: _Metadata, share: int, head_dim: int) -> dict[str, Any]:
    """What llama.cpp takes a file for; what it leaves out has the family's value.

    Args:
        metadata: of the file.
        share: of the hidden size, that a head would have if the heads divided it.
        head_dim: size of a head.
    """
    architecture = ARCHITECTURES[metadata.architecture]
    is_largest = metadata.size("block_count") == architecture.layers_of_largest
    values: dict[str, Any] = {"query_pre_attn_scalar": share if is_largest else head_dim}
    for key, kind, name in (
        ("attn_logit_softcapping", float, "attn_logit_softcapping"),
        ("final_logit_softcapping", float, "final_logit_softcapping"),
        ("attention.sliding_window", int, "sliding_window"),
        ("attention.sliding_window_pattern", int, "sliding_window_pattern"),
    ):
        if metadata.has(key):
            values[name] = metadata.get(key, kind)
    if architecture.sliding_theta is not None:
        theta = metadata.get("rope.freq_base_swa", float, architecture.sliding_theta)
        values["rope_parameters"] = {
            "full_attention": _rope(metadata),
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }
    return values


def frequency_factors(file: GgufFile) -> tuple[float, ...]:
    """Divisors of the inverse rope frequencies (llama3 scaling), empty if there are none."""
    if ROPE_FACTORS not in file.tensors:
        return ()
    factors = tuple(file.read(ROPE_FACTORS).ravel().tolist())
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} has values that are not positive"
        )
    return factors


def read_generation(file: GgufFile) -> GenerationDefaults:
    """Stop ids (end of sequence, of turn, of message) and recommended sampling of the metadata."""
    ids = {file.get(f"tokenizer.ggml.{name}", int) for name in _STOP_IDS} - {None}
    found = {ours: _number(file, key) for key, ours in _SAMPLING.items()}
    return GenerationDefaults(
        eos_token_ids=tuple(sorted(token_id for token_id in ids if token_id is not None)),
        sampling={key: value for key, value in found.items() if value is not None},
    )


def _number(file: GgufFile, key: str) -> int | float | None:
    whole = type(file.metadata.get(key)) is int
    return file.get(key, int) if whole else file.get(key, float)


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path} lacks tensor 'token_embd.weight' of two dimensions")
    return embedding.shape[0]


def _rope(metadata: _Metadata) -> dict[str, Any]:
    kind = metadata.get("rope.scaling.type", str, "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{metadata.file.path}: rope scaling {kind!r} is not supported; "
            "none, linear and yarn are"
        )
    theta = metadata.get("rope.freq_base", float, 10_000.0)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    rope = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": metadata.get("rope.scaling.factor", float),
    }
    if kind == "yarn":
        metadata.require("rope.scaling.attn_factor", 1.0)
        rope |= {
            "original_max_position_embeddings": metadata.size(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", float, 1.0),
        }
    return rope


class _Metadata:
    """The architecture's own keys, without their prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.get("general.architecture", str)
        if architecture is None or architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {architecture!r} is not supported; "
                f"{', '.join(ARCHITECTURES)} are"
            )
        self.architecture = architecture

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """The value of a key; one value per layer counts as one if all are equal."""
        full = f"{self.architecture}.{key}"
        value: Value | None
        if isinstance(self.file.metadata.get(full), list):
            values = self.file.get_list(full, kind) or []
            if len(set(values)) != 1:
                raise CheckpointError(
                    f"{self.file.path}: {full} differs between layers, which is not supported"
                )
            value = values[0]
        else:
            value = self.file.get(full, kind, default)
        if value is None:
            raise CheckpointError(f"{self.file.path} lacks the metadata key {full!r}")
        return value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value < 1:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} is {value}, must be positive"
            )
        return value

    def require(self, key: str, supported: Value) -> None:
        value = self.get(key, type(supported), supported)
        if value != supported:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} = {value!r} is not supported; "
                f"{supported!r} is"
            )
