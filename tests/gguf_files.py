"""GGUF files of tiny models, written with the `gguf` package the way llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from tests.checkpoints import CHAT_TEMPLATE, SPECIAL_TOKENS, TinyCheckpoint, tiny_tokenizer

ARCHITECTURES = {
    "llama": "llama",
    "llama3": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True, kw_only=True)
class TinyGguf:
    """What to write: `TinyGguf(family="qwen3", kind="Q8_0").write(path)`.

    `kind` is the ggml type of the matrices; vectors are float32. `metadata` is merged over what the
    family implies; a value of None leaves the key out.
    """

    family: str = "llama"
    kind: str = "F32"
    config: Mapping[str, Any] = field(default_factory=dict)
    pre: str = "smollm"
    tokenizer: tokenizers.Tokenizer = field(default_factory=tiny_tokenizer)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def source(self) -> TinyCheckpoint:
        """The same model as a Hugging Face checkpoint."""
        config = {"intermediate_size": 128} | dict(self.config)
        tiny = TinyCheckpoint(family=self.family, config=config, seed=self.seed)
        if not self.has_post_norms:
            return tiny
        # Files do not say it: queries are scaled by the head's size.
        scalar = {"query_pre_attn_scalar": tiny.config_values["head_dim"]}
        return replace(tiny, config=config | scalar)

    @property
    def has_post_norms(self) -> bool:
        return self.family in ("gemma2", "gemma3")

    def write(
        self,
        path: Path,
        extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
        leave_out: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Write the file; returns its tensors as a reader must give them back.

        Args:
            path: the file.
            extra: further tensors under their GGUF names.
            leave_out: GGUF name of a tensor that is not written.
        """
        metadata = self.metadata_values
        writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
        for key, value in metadata.items():
            _add(writer, key, value)
        expected = {}
        for name, tensor in self.source.tensors().items():
            if self.gguf_name(name) != leave_out:
                expected[name] = self._add_tensor(writer, name, tensor.numpy())
        for name, values in (extra or {}).items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return expected

    def _add_tensor(
        self, writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any]
    ) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType[self.kind if values.ndim == 2 else "F32"]
        stored = self.gguf_name(name)
        offset = 1 if self.family.startswith("gemma") and stored.endswith("norm.weight") else 0
        permuted = ARCHITECTURES[self.family] == "llama" and (
            ".attn_q." in stored or ".attn_k." in stored
        )
        values = values + np.float32(offset) if offset else values
        ordered = permute(values, self.head_dim) if permuted else values
        data = ordered if kind == gguf.GGMLQuantizationType.F32 else gguf.quantize(ordered, kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
        back = values if kind == gguf.GGMLQuantizationType.F32 else gguf.quantize(values, kind)
        return torch.from_numpy(gguf.dequantize(back, kind).copy()) - offset

    def gguf_name(self, name: str) -> str:
        """Hugging Face's tensor name in this architecture's spelling."""
        return gguf_name(name, NAMES | POST_NORM_NAMES if self.has_post_norms else NAMES)

    @property
    def head_dim(self) -> int:
        values = self.source.config_values
        size: int = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
        return size

    @property
    def metadata_values(self) -> dict[str, Any]:
        """All metadata that is written."""
        values = self.source.config_values
        prefix = ARCHITECTURES[self.family]
        own = {
            "context_length": values["max_position_embeddings"],
            "embedding_length": values["hidden_size"],
            "block_count": values["num_hidden_layers"],
            "feed_forward_length": values["intermediate_size"],
            "attention.head_count": values["num_attention_heads"],
            "attention.head_count_kv": values["num_key_value_heads"],
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": values["rms_norm_eps"],
            "rope.freq_base": values["rope_theta"],
            "rope.dimension_count": self.head_dim,
            "vocab_size": values["vocab_size"],
        }
        if self.has_post_norms:
            own |= later_gemma_metadata(values)
        merged = {f"{prefix}.{key}": value for key, value in own.items()}
        merged["general.architecture"] = prefix
        merged |= tokenizer_metadata(self.tokenizer, self.pre, values["vocab_size"])
        merged["tokenizer.chat_template"] = CHAT_TEMPLATE
        merged |= self.metadata
        return {key: value for key, value in merged.items() if value is not None}


def later_gemma_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that Gemma has from its second version on, without the architecture's prefix."""
    own = {
        "attn_logit_softcapping": values.get("attn_logit_softcapping"),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "attention.sliding_window": values["sliding_window"],
        "attention.sliding_window_pattern": values.get("sliding_window_pattern"),
        "rope.freq_base_swa": values.get("rope_local_base_freq"),
    }
    scaling = values.get("rope_scaling")
    if scaling is not None:
        own["rope.scaling.type"] = scaling["rope_type"]
        own["rope.scaling.factor"] = scaling["factor"]
    return own


def tokenizer_metadata(
    tokenizer: tokenizers.Tokenizer, pre: str, vocab_size: int
) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer whose special tokens are `SPECIAL_TOKENS`."""
    vocab = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [vocab.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    special = tokenizer.get_added_tokens_decoder()
    kinds = []
    for index in range(vocab_size):
        if index in special:
            kinds.append(3 if special[index].special else 4)
        else:
            kinds.append(1 if index in vocab else 5)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges_of(tokenizer),
        "tokenizer.ggml.bos_token_id": SPECIAL_TOKENS.index("<s>"),
        "tokenizer.ggml.eos_token_id": SPECIAL_TOKENS.index("</s>"),
    }


def merges_of(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The merges as GGUF spells them: two tokens with a space between."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def gguf_name(name: str, names: Mapping[str, str] = NAMES) -> str:
    """Hugging Face's tensor name in GGUF's spelling."""
    stem, _, kind = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def permute(values: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """The llama converter's row order: row i of a head's halves side by side, one by one."""
    result = np.empty_like(values)
    half = head_dim // 2
    for start in range(0, len(values), head_dim):
        for row in range(half):
            result[start + 2 * row] = values[start + row]
            result[start + 2 * row + 1] = values[start + row + half]
    return result


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")
