"""The architecture of a decoder, as flags: what the families differ in.

Filled from a Hugging Face `config.json` or from GGUF metadata (`weights/`), read by `models/`. It
knows nothing of devices or storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position encoding: everything reduces to inverse frequencies and one factor.

    Kind `factors`: each default inverse frequency is divided by its number in `frequency_factors`
    (half the rotary dimension of them). GGUF files bring llama3 scaling this way.
    """

    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: scales cos and sin; None: 0.1 ln(factor) + 1
    rotary_dim: int | None = None  # None: the whole head
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts that take the place of the MLP in sparse layers."""

    num_experts: int
    top_k: int  # experts of one token
    intermediate_size: int  # of one expert
    renormalise: bool  # the chosen experts' shares sum to one
    sparse_layers: tuple[bool, ...] = ()  # empty: every layer


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder. Sizes in elements; `dtype` is the checkpoint's own (a torch dtype name)."""

    architecture: str  # e.g. LlamaForCausalLM
    model_type: str  # e.g. llama
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    dtype: str = "bfloat16"
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_rope: RopeConfig | None = None  # of layers with a window; None: as the others'
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"  # as the kernels call it
    norm_offset: float = 0.0  # norms multiply by weight + offset
    post_norms: bool = False  # what attention and MLP yield is normed before it is added
    embedding_scale: float = 1.0  # of embedded tokens, once it is rounded to the dtype in use
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # empty: every layer where sliding_window is set
    experts: ExpertsConfig | None = None
    kv_scales: bool = False  # there are scales for keys and values that are stored in fp8

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The layer's experts; None if it has an MLP."""
        experts = self.experts
        if experts is None or not experts.sparse_layers or experts.sparse_layers[layer]:
            return experts
        return None
