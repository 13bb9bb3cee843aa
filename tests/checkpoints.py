"""Tiny random checkpoints in Hugging Face's format: both we and `transformers` read them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from trunkline.engine.weights.config_json import parse_config
from trunkline.engine.weights.layout import expected_tensors

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEXT = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "def add(first, second):\n    return first + second\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; 1234567890.",
    "the the the and and of of to to in in is is that that it it for for with with",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 32,
        "sliding_window": 24,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 32,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": 1000000.0,
        "head_dim": 32,
        "attention_bias": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_theta": 1000000.0,
        "head_dim": 32,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
        "tie_word_embeddings": True,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": "gelu",
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class TinyCheckpoint:
    """What to write: `TinyCheckpoint(family="qwen3", config={...}).write(directory)`.

    The same recipe gives the same bytes. `config` is merged over the family's config.json; a value
    of None removes nothing, it is written as null.
    """

    family: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    num_shards: int = 1
    weight_format: str = "safetensors"  # or "pt"
    seed: int = 0
    with_tokenizer: bool = True
    chat_template: str | None = CHAT_TEMPLATE

    @property
    def config_values(self) -> dict[str, Any]:
        """The content of config.json, a copy: transformers writes into nested values."""
        return copy.deepcopy(_COMMON | FAMILIES[self.family] | dict(self.config))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights, scaled so that activations and logits are of order one."""
        config = parse_config(self.config_values, "config.json")
        dtype = getattr(torch, config.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        tensors = {}
        for name, shape in expected_tensors(config).items():
            noise = torch.randn(shape, generator=generator)
            if name.endswith("norm.weight"):
                values = 1 - config.norm_offset + 0.1 * noise
            elif name.endswith(".bias"):
                values = 0.1 * noise
            else:
                values = noise / math.sqrt(shape[-1])
            tensors[name] = values.to(dtype)
        return tensors

    def write(self, directory: Path) -> Path:
        """Write the checkpoint into `directory`, created if it is missing; returns it."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "config.json", self.config_values)
        write_weights(directory, self.tensors(), self.num_shards, self.weight_format)
        if self.with_tokenizer:
            write_tokenizer(directory, self.chat_template)
        return directory


def split_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state of transformers as its files have it: one tensor per expert and projection."""
    split = {}
    for name, tensor in state.items():
        prefix, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                split[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate
                split[f"{prefix}.experts.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            for expert, down in enumerate(tensor):
                split[f"{prefix}.experts.{expert}.down_proj.weight"] = down
        else:
            split[name] = tensor
    return split


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2))


def write_weights(
    directory: Path, tensors: Mapping[str, torch.Tensor], num_shards: int, weight_format: str
) -> None:
    """Write one weight file, or shards and their index."""
    stem, suffix = {
        "safetensors": ("model", "safetensors"),
        "pt": ("pytorch_model", "bin"),
    }[weight_format]
    if num_shards == 1:
        _save(directory / f"{stem}.{suffix}", dict(tensors))
        return
    names = list(tensors)
    weight_map = {}
    for number in range(num_shards):
        file_name = f"{stem}-{number + 1:05}-of-{num_shards:05}.{suffix}"
        part = {name: tensors[name] for name in names[number::num_shards]}
        weight_map |= dict.fromkeys(part, file_name)
        _save(directory / file_name, part)
    write_json(
        directory / f"{stem}.{suffix}.index.json", {"metadata": {}, "weight_map": weight_map}
    )


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, metadata={"format": "pt"})


def tiny_tokenizer(add_bos: bool = True) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of 300 tokens, ids 0..4 special; with `add_bos` it adds `<s>`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def write_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json of `tiny_tokenizer`."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    if chat_template is not None:
        values["chat_template"] = chat_template
    write_json(directory / "tokenizer_config.json", values)
