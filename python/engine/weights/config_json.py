"""From a Hugging Face `config.json`, in its old and its new spelling, to a DecoderConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.models.config import DecoderConfig, ExpertsConfig, RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "float16", "bfloat16")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as the kernels call them
SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers
ATTENTION_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
# Scales that the kernels take: one for the keys and one for the values of a layer.
KV_SCHEME = {
    "type": "float",
    "num_bits": 8,
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
MAX_SIZE = 2**31 - 1  # sizes and ids travel as int32
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the architecture implies, and its defaults for keys that config.json leaves out."""

    model_type: str
    qkv_bias: bool = False  # always; else by the key `attention_bias`
    bias_keys: tuple[str, ...] = ()  # of attention_bias and mlp_bias, those that count
    qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    sliding_window: int | None = None
    window_needs_flag: bool = False  # sliding_window counts only with use_sliding_window
    window_by_layer: bool = True  # layer_types or max_window_layers say which layers have it
    window_pattern: int | None = None  # without layer_types, each layer but every n-th has it
    theta: float = 10_000.0
    sliding_theta: float | None = None  # layers with the window have a rope of their own
    experts: bool = False
    tied: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    norm_offset: float = 0.0
    post_norms: bool = False
    scaled_embedding: bool = False  # by the root of the hidden size
    query_scalar: int | None = None  # query_pre_attn_scalar counts, and this is its default
    soft_caps: Mapping[str, float | None] = field(default_factory=dict)  # keys that count: defaults


_GEMMA_2 = _Family(
    model_type="gemma2",
    bias_keys=("attention_bias",),
    head_dim=256,
    sliding_window=4096,
    window_pattern=2,
    tied=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    norm_offset=1.0,
    post_norms=True,
    scaled_embedding=True,
    query_scalar=256,
    soft_caps={ATTENTION_CAP: 50.0, LOGIT_CAP: 30.0},
)
FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(model_type="llama", bias_keys=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": _Family(model_type="mistral", sliding_window=4096),
    "Qwen2ForCausalLM": _Family(
        model_type="qwen2", qkv_bias=True, sliding_window=4096, window_needs_flag=True
    ),
    "Qwen3ForCausalLM": _Family(
        model_type="qwen3",
        qk_norm=True,
        bias_keys=("attention_bias",),
        head_dim=128,
        sliding_window=4096,
        window_needs_flag=True,
    ),
    "Qwen3MoeForCausalLM": _Family(
        model_type="qwen3_moe",
        qk_norm=True,
        bias_keys=("attention_bias",),
        sliding_window=4096,
        window_needs_flag=True,
        window_by_layer=False,
        experts=True,
    ),
    "GemmaForCausalLM": _Family(
        model_type="gemma",
        bias_keys=("attention_bias",),
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        # Files that say gelu are older than the name of what is meant.
        activations=ACTIVATIONS | {"gelu": "gelu_tanh"},
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": replace(
        _GEMMA_2,
        model_type="gemma3_text",
        qk_norm=True,
        window_pattern=6,
        theta=1_000_000.0,
        sliding_theta=10_000.0,
        soft_caps={ATTENTION_CAP: None, LOGIT_CAP: None},
    ),
}


def parse_config(values: Mapping[str, Any], source: str) -> DecoderConfig:
    """Read the architecture out of a config.json's values.

    Args:
        values: the parsed file.
        source: the file's name, for messages.

    Raises:
        CheckpointError: a required key is missing or of the wrong type, or a value asks for
            something that is not supported; the message says what is.
    """
    return _Parser(values, source).decoder()


_REQUIRED: Any = object()


class _Parser:
    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source
        architectures = values.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise self._refusal("architectures", architectures, ", ".join(FAMILIES))
        name = str(architectures[0])
        if name not in FAMILIES:
            raise self._refusal("architectures", architectures, ", ".join(FAMILIES))
        self._architecture = name
        self._family = FAMILIES[name]

    def decoder(self) -> DecoderConfig:
        self._refuse_unsupported()
        kv_scales = self._kv_scales()
        family = self._family
        hidden, heads = self._size("hidden_size"), self._size("num_attention_heads")
        head_dim = self._size("head_dim", family.head_dim or hidden // heads)
        num_kv_heads = self._size("num_key_value_heads", heads)
        if heads % num_kv_heads:
            raise CheckpointError(
                f"{self._source}: num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        attention_bias = self._has_bias("attention_bias")
        num_layers = self._size("num_hidden_layers", limit=MAX_LAYERS)
        window, window_layers = self._window(num_layers)
        return DecoderConfig(
            architecture=self._architecture,
            model_type=family.model_type,
            vocab_size=self._size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._size("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self._number("rms_norm_eps", family.rms_norm_eps),
            max_position=self._size("max_position_embeddings"),
            dtype=self._dtype(),
            rope=self._rope(self._rope_values(), "rope_theta", family.theta),
            sliding_rope=self._sliding_rope(),
            tie_word_embeddings=self._flag("tie_word_embeddings", family.tied),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=self._has_bias("mlp_bias"),
            qk_norm=family.qk_norm,
            hidden_act=self._activation(),
            norm_offset=family.norm_offset,
            post_norms=family.post_norms,
            embedding_scale=math.sqrt(hidden) if family.scaled_embedding else 1.0,
            attention_scale=self._attention_scale(),
            attention_soft_cap=self._soft_cap(ATTENTION_CAP),
            logit_soft_cap=self._soft_cap(LOGIT_CAP),
            sliding_window=window,
            sliding_layers=window_layers,
            experts=self._experts(num_layers) if family.experts else None,
            kv_scales=kv_scales,
        )

    def _experts(self, num_layers: int) -> ExpertsConfig:
        # Transformers 5 calls them local; both names are in use.
        key = "num_local_experts" if self._values.get("num_experts") is None else "num_experts"
        num_experts = self._size(key, 128)
        top_k = self._size("num_experts_per_tok", 8)
        if top_k > num_experts:
            raise self._refusal("num_experts_per_tok", top_k, f"1 to num_experts, {num_experts}")
        step = self._size("decoder_sparse_step", 1)
        dense = self._values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            raise self._refusal("mlp_only_layers", dense, "a list of layer numbers")
        layers = tuple(
            (layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)
        )
        return ExpertsConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=self._size("moe_intermediate_size", 768),
            renormalise=self._flag("norm_topk_prob"),
            sparse_layers=() if all(layers) else layers,
        )

    def _kv_scales(self) -> bool:
        """Whether there are scales for an fp8 KV pool; quantised weights are refused."""
        quantization = self._values.get("quantization_config")
        if quantization is None:
            return False
        values = quantization if isinstance(quantization, dict) else {}
        method = values.get("quant_method")
        if method != "compressed-tensors" or values.get("config_groups"):
            raise self._refusal(
                "quantization_config.quant_method",
                method,
                "none (weights in float32, float16 or bfloat16), GGUF files, and "
                "compressed-tensors that quantises nothing but keys and values",
            )
        scheme = values.get("kv_cache_scheme")
        if scheme is None:
            return False
        scheme = scheme if isinstance(scheme, dict) else {}
        for key, wanted in KV_SCHEME.items():
            if scheme.get(key) != wanted:
                name = f"quantization_config.kv_cache_scheme.{key}"
                raise self._refusal(name, scheme.get(key), repr(wanted))
        return True

    def _refuse_unsupported(self) -> None:
        if bidirectional := self._values.get("use_bidirectional_attention"):
            raise self._refusal("use_bidirectional_attention", bidirectional, "false")

    def _activation(self) -> str:
        key = self._family.activation_key
        name = self._values.get(key, self._family.activation)
        if name not in self._family.activations:
            raise self._refusal(key, name, ", ".join(self._family.activations))
        return self._family.activations[name]

    def _attention_scale(self) -> float | None:
        default = self._family.query_scalar
        if default is None:
            return None
        scalar = self._number("query_pre_attn_scalar", default)
        if not scalar > 0:
            raise self._refusal("query_pre_attn_scalar", scalar, "numbers above 0")
        return float(scalar**-0.5)

    def _soft_cap(self, key: str) -> float | None:
        """A cap, None where the family has none or the file says null."""
        caps = self._family.soft_caps
        if key not in caps:
            return None
        value = self._values.get(key, caps[key])
        if value is None:
            return None
        cap = float(self._number(key, value))
        if not 0 < cap < math.inf:
            raise self._refusal(key, cap, "numbers above 0, or null for no cap")
        return cap

    def _has_bias(self, key: str) -> bool:
        return key in self._family.bias_keys and self._flag(key)

    def _dtype(self) -> str:
        name = self._values.get("dtype") or self._values.get("torch_dtype") or "float32"
        short = str(name).removeprefix("torch.")
        if short not in DTYPES:
            raise self._refusal("dtype", name, ", ".join(DTYPES))
        return short

    def _window(self, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """The sliding window and which layers have it (empty: all)."""
        family = self._family
        if family.window_needs_flag and not self._flag("use_sliding_window"):
            return None, ()
        window = self._values.get("sliding_window", family.sliding_window)
        if window is None:
            return None, ()
        kinds = self._values.get("layer_types") if family.window_by_layer else None
        if not family.window_by_layer:
            layers = (True,) * num_layers
        elif kinds is not None:
            known = {SLIDING: True, FULL: False}
            if len(kinds) != num_layers or not set(kinds) <= known.keys():
                raise self._refusal("layer_types", kinds, f"{num_layers} of {', '.join(known)}")
            layers = tuple(known[kind] for kind in kinds)
        elif family.window_needs_flag:
            first = self._number("max_window_layers", 28)
            layers = tuple(layer >= first for layer in range(num_layers))
        elif family.window_pattern is not None:
            pattern = self._size("sliding_window_pattern", family.window_pattern)
            layers = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
        else:
            layers = (True,) * num_layers
        if not any(layers):
            return None, ()
        window = self._size("sliding_window", window)
        return window, () if all(layers) else layers

    def _sliding_rope(self) -> RopeConfig | None:
        """The rope of layers with the window, where the family has one for them."""
        theta = self._family.sliding_theta
        if theta is None:
            return None
        rope = self._rope_part(self._rope_object(), SLIDING)
        return self._rope(rope, "rope_local_base_freq", theta)

    def _rope(self, rope: Mapping[str, Any], theta_key: str, default_theta: float) -> RopeConfig:
        """One of the config's ropes; its base may stand beside it, under `theta_key`."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise self._refusal("rope_type", kind, ", ".join(ROPE_KINDS))
        partial = rope.get("partial_rotary_factor", self._values.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise self._refusal("partial_rotary_factor", partial, "1.0")
        read = _RopeReader(rope, self._source, kind)
        has_base = rope.get("rope_theta") is not None
        base = None if has_base else self._values.get(theta_key, default_theta)
        theta = read.number("rope_theta", base)
        if kind == "default":
            return RopeConfig(theta=theta)
        longest = self._size("max_position_embeddings")
        original = self._size(
            "original_max_position_embeddings",
            int(read.number("original_max_position_embeddings", longest)),
        )
        factor = read.number("factor", longest / original if kind == "yarn" else None)
        common = {"kind": kind, "theta": theta, "factor": factor}
        if kind == "linear":
            return RopeConfig(**common)
        if kind == "llama3":
            return RopeConfig(
                **common,
                low_freq_factor=read.number("low_freq_factor"),
                high_freq_factor=read.number("high_freq_factor"),
                original_max_position=original,
            )
        if rope.get("truncate", True) is not True:
            raise self._refusal("truncate of rope_type yarn", rope["truncate"], "true")
        return RopeConfig(
            **common,
            beta_fast=read.number("beta_fast", 32.0),
            beta_slow=read.number("beta_slow", 1.0),
            original_max_position=original,
            attention_factor=read.attention_factor(),
        )

    def _rope_values(self) -> Mapping[str, Any]:
        """The rope of all layers; of those without the window where the others have their own."""
        rope = self._rope_object()
        if self._family.sliding_theta is not None and {FULL, SLIDING} & rope.keys():
            return self._rope_part(rope, FULL)
        per_layer_kind = [value for value in rope.values() if isinstance(value, dict)]
        if per_layer_kind:
            if any(value != per_layer_kind[0] for value in per_layer_kind):
                raise self._refusal("rope_parameters", rope, "the same for every layer type")
            return per_layer_kind[0]
        return rope

    def _rope_object(self) -> Mapping[str, Any]:
        """`rope_parameters` (new) or `rope_scaling` (old), empty if neither is set."""
        rope = self._values.get("rope_parameters")
        if rope is None:
            rope = self._values.get("rope_scaling")
        if rope is None:
            return {}
        if not isinstance(rope, dict):
            raise self._refusal("rope_parameters", rope, "an object")
        return rope

    def _rope_part(self, rope: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        part = rope.get(kind)
        if part is None:
            return {}
        if not isinstance(part, dict):
            raise self._refusal(f"rope_parameters.{kind}", part, "an object")
        return part

    def _size(self, key: str, default: Any = _REQUIRED, limit: int = MAX_SIZE) -> int:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise CheckpointError(f"{self._source} lacks the key {key!r}")
        if type(value) is not int or not 1 <= value <= limit:
            raise self._refusal(key, value, f"an integer from 1 to {limit}")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._refusal(key, value, "a number")
        return value

    def _flag(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool | None):
            raise self._refusal(key, value, "true or false")
        return default if value is None else value

    def _refusal(self, key: str, value: object, supported: str) -> CheckpointError:
        return CheckpointError(
            f"{self._source}: {key} = {value!r} is not supported; supported: {supported}"
        )


class _RopeReader:
    """Numbers of a rope object, and what they imply."""

    def __init__(self, rope: Mapping[str, Any], source: str, kind: str) -> None:
        self._rope = rope
        self._where = f"{source}: rope_type {kind!r}"

    def number(self, key: str, default: Any = None) -> float:
        value = self._rope.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self._where} needs {key} as a positive number, not {value!r}")
        return float(value)

    def attention_factor(self) -> float | None:
        """Yarn's factor on cos and sin if the file implies another than the default."""
        if self._rope.get("attention_factor") is not None:
            return self.number("attention_factor")
        if not (self._rope.get("mscale") and self._rope.get("mscale_all_dim")):
            return None
        log = 0.1 * math.log(max(self.number("factor"), 1.0))
        return (log * self.number("mscale") + 1) / (log * self.number("mscale_all_dim") + 1)
