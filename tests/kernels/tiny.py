"""Tiny random models of every family, and checkpoints in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.checkpoints import split_experts

from trunkline.engine.checkpoint import GenerationDefaults
from trunkline.engine.models.config import DecoderConfig, ExpertsConfig, RopeConfig
from trunkline.engine.runner import Runner, RunnerOptions

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
EXPERTS = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
# Both caps are about as large as what they bound.
GEMMA2 = {
    "head_dim": 16,
    "sliding_window": 37,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MIXED_LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]


def moe_changes(renormalise: bool, sparse_layers: tuple[bool, ...]) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=8,
        top_k=3,
        intermediate_size=24,
        renormalise=renormalise,
        sparse_layers=sparse_layers,
    )
    return {"model_type": "qwen3_moe", "head_dim": 16, "qk_norm": True, "experts": experts}


# name: (transformers class prefix, changes to BASE, changes to the DecoderConfig)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "llama-llama3-rope": (
        "Llama",
        {"rope_parameters": LLAMA3},
        {"rope": RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_max_position=64)},
    ),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": LINEAR},
        {"rope": RopeConfig(kind="linear", factor=2.0)},
    ),
    "llama-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 37}, {"sliding_window": 37}),
    "mistral-head-dim": (
        "Mistral",
        {"sliding_window": None, "head_dim": 32},
        {"head_dim": 32},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {"qkv_bias": True}),
    "qwen2-mixed-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "layer_types": MIXED_LAYERS},
        {"qkv_bias": True, "sliding_window": 50, "sliding_layers": (False, True, True)},
    ),
    "qwen2-yarn": (
        "Qwen2",
        {"rope_parameters": YARN},
        {
            "qkv_bias": True,
            "rope": RopeConfig(kind="yarn", factor=4.0, original_max_position=128),
        },
    ),
    "llama-wide": (
        "Llama",
        {
            "vocab_size": 3001,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 2,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "initializer_range": 0.05,
        },
        {},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}, {"head_dim": 16, "qk_norm": True}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}, moe_changes(True, ())),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**EXPERTS, "mlp_only_layers": [2], "decoder_sparse_step": 1},
        moe_changes(False, (True, True, False)),
    ),
    "gemma2": (
        "Gemma2",
        GEMMA2,
        {
            "head_dim": 16,
            "sliding_window": 37,
            "sliding_layers": (True, False, True),
            "hidden_act": "gelu_tanh",
            "norm_offset": 1.0,
            "post_norms": True,
            "embedding_scale": 48**0.5,
            "attention_scale": 24**-0.5,
            "attention_soft_cap": 2.0,
            "logit_soft_cap": 3.0,
        },
    ),
    "gemma": (
        "Gemma",
        {"head_dim": 16, "tie_word_embeddings": True},
        {
            "head_dim": 16,
            "hidden_act": "gelu_tanh",
            "norm_offset": 1.0,
            "embedding_scale": 48**0.5,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 37,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": GEMMA3_ROPES,
            "tie_word_embeddings": True,
        },
        {
            "head_dim": 16,
            "qk_norm": True,
            "sliding_window": 37,
            "sliding_layers": (True, True, False),
            "rope": RopeConfig(kind="linear", theta=1e6, factor=8.0),
            "sliding_rope": RopeConfig(theta=10000.0),
            "hidden_act": "gelu_tanh",
            "norm_offset": 1.0,
            "post_norms": True,
            "embedding_scale": 48**0.5,
            "attention_scale": 24**-0.5,
        },
    ),
}
TEXT_CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # of classes whose own also has other modalities
DENSE_FAMILIES = tuple(name for name in FAMILIES if not name.startswith("qwen3-moe"))


@dataclass
class MemoryCheckpoint:
    """A checkpoint whose tensors are in memory."""

    config: DecoderConfig
    weights: dict[str, torch.Tensor]
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.weights)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()


def reference_model(family: str, seed: int = 0) -> Any:
    """A random transformers model in float32, every parameter (norms, biases too) random."""
    import transformers

    prefix, changes, _ = FAMILIES[family]
    config_class = getattr(transformers, TEXT_CONFIGS.get(prefix, f"{prefix}Config"))
    config = config_class(**{**BASE, **copy.deepcopy(changes)})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def decoder_config(family: str, **changes: Any) -> DecoderConfig:
    prefix, reference, ours = FAMILIES[family]
    merged = {**BASE, **reference}
    fields: dict[str, Any] = {
        "architecture": f"{prefix}ForCausalLM",
        "model_type": prefix.lower(),
        "vocab_size": merged["vocab_size"],
        "hidden_size": merged["hidden_size"],
        "intermediate_size": merged["intermediate_size"],
        "num_layers": merged["num_hidden_layers"],
        "num_heads": merged["num_attention_heads"],
        "num_kv_heads": merged["num_key_value_heads"],
        "head_dim": merged["hidden_size"] // merged["num_attention_heads"],
        "rms_norm_eps": merged["rms_norm_eps"],
        "max_position": merged["max_position_embeddings"],
        "tie_word_embeddings": merged["tie_word_embeddings"],
        "dtype": "float32",
    }
    return DecoderConfig(**{**fields, **ours, **changes})


def memory_checkpoint(family: str, seed: int = 0, **changes: Any) -> MemoryCheckpoint:
    """The weights of `reference_model`, named as a saved checkpoint names them."""
    model = reference_model(family, seed)
    weights = split_experts({n: tensor.detach() for n, tensor in model.state_dict().items()})
    config = decoder_config(family, **changes)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    return MemoryCheckpoint(config, weights)


def scaled_checkpoint(family: str, key: float, value: float) -> MemoryCheckpoint:
    """The same model with larger keys and values, and scales for them.

    Of powers of two nothing is rounded otherwise: where scales are honoured the bits stay.
    """
    made = memory_checkpoint(family, kv_scales=True)
    factors = {"q_proj": 1 / key, "k_proj": key, "v_proj": value, "o_proj": 1 / value}
    for name in made.weights:
        for part, factor in factors.items():
            # The output's bias is not of the values.
            if f".{part}." in name and not name.endswith("o_proj.bias"):
                made.weights[name] = made.weights[name] * factor
    for layer in range(made.config.num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        made.weights[f"{prefix}k_scale"] = torch.tensor([key])
        made.weights[f"{prefix}v_scale"] = torch.tensor([value])
    return made


def tiny_runner(checkpoint: MemoryCheckpoint, **changes: Any) -> Runner:
    options: dict[str, Any] = {
        "num_pages": 400,
        "max_running_requests": 40,
        "max_context_len": 512,
        "progress": False,
    }
    return Runner(checkpoint, RunnerOptions(**{**options, **changes}))
