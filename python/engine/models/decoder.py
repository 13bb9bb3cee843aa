"""The decoder: one model for all families that differ only in the flags of `DecoderConfig`.

x = embedding[tokens]
per layer:  x += o(attention(qkv(norm(x))));  x += mlp(norm(x))
mlp(y) = down(act(gate(y)) * up(y)), or the weighted sum of a token's experts, which are the same
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.models.rotary import rotary_spec
from trunkline.kernels import (
    Activation,
    ActivationName,
    AttentionSpec,
    Backend,
    Batch,
    ExpertsSpec,
    LinearPart,
    LinearSpec,
    Weight,
)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """Handles of an MLP."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Handle of a router and its experts."""

    experts: Weight


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's handles."""

    attention_norm: Weight
    query_key_value: Weight
    attention: AttentionSpec
    attention_output: Weight
    mlp_norm: Weight
    mlp: DenseMlp | SparseMlp


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Final hidden states of all tokens (before the last norm), and what is wanted of them."""

    hidden: Activation
    logits: Activation
    pooled_states: Activation


class Decoder:
    """A decoder whose weights are loaded through `bindings`."""

    def __init__(
        self, config: DecoderConfig, backend: Backend, num_positions: int, tied: bool
    ) -> None:
        """Create empty handles.

        Args:
            config: the architecture.
            backend: owner of the handles and of all computation.
            num_positions: longest sequence.
            tied: the head is the embedding's table.

        Raises:
            ValueError: the config asks for something that no backend has.
        """
        if config.hidden_act not in get_args(ActivationName):
            raise ValueError(
                f"hidden_act {config.hidden_act!r} of {config.architecture} is not supported; "
                f"known: {', '.join(get_args(ActivationName))}"
            )
        self.config = config
        self._backend = backend
        self._rotary = backend.create_rotary(rotary_spec(config, num_positions))
        self.embedding = backend.create_embedding(config.vocab_size, config.hidden_size)
        self.layers = [self._create_layer(index) for index in range(config.num_layers)]
        self.norm = backend.create_norm(config.hidden_size, config.rms_norm_eps)
        if tied:
            self.head = backend.create_tied_linear(self.embedding)
        else:
            self.head = self._linear(config.hidden_size, LinearPart("lm_head", config.vocab_size))

    def _linear(self, in_features: int, *parts: LinearPart) -> Weight:
        return self._backend.create_linear(LinearSpec(in_features, parts))

    def _create_layer(self, index: int) -> DecoderLayer:
        config = self.config
        create_norm = self._backend.create_norm
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        slides = config.sliding_layers[index] if config.sliding_layers else True
        attention = AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary=self._rotary,
            window=config.sliding_window if slides else None,
            query_norm=create_norm(config.head_dim, config.rms_norm_eps)
            if config.qk_norm
            else None,
            key_norm=create_norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None,
        )
        return DecoderLayer(
            attention_norm=create_norm(config.hidden_size, config.rms_norm_eps),
            query_key_value=self._linear(
                config.hidden_size,
                LinearPart("q_proj", query_size, config.qkv_bias),
                LinearPart("k_proj", kv_size, config.qkv_bias),
                LinearPart("v_proj", kv_size, config.qkv_bias),
            ),
            attention=attention,
            attention_output=self._linear(
                query_size, LinearPart("o_proj", config.hidden_size, config.o_bias)
            ),
            mlp_norm=create_norm(config.hidden_size, config.rms_norm_eps),
            mlp=self._create_mlp(index),
        )

    def _create_mlp(self, layer: int) -> DenseMlp | SparseMlp:
        config = self.config
        experts = config.experts_of(layer)
        if experts is not None:
            spec = ExpertsSpec(
                hidden_size=config.hidden_size,
                width=experts.intermediate_size,
                num_experts=experts.num_experts,
                top_k=experts.top_k,
                renormalise=experts.renormalise,
                activation="silu",
            )
            return SparseMlp(self._backend.create_experts(spec))
        width, bias = config.intermediate_size, config.mlp_bias
        gate, up = LinearPart("gate_proj", width, bias), LinearPart("up_proj", width, bias)
        return DenseMlp(
            gate_up=self._linear(config.hidden_size, gate, up),
            down=self._linear(width, LinearPart("down_proj", config.hidden_size, bias)),
        )

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every handle with the prefix of its tensors' names in Hugging Face's spelling."""
        yield "model.embed_tokens.", self.embedding
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            yield f"{prefix}input_layernorm.", layer.attention_norm
            yield f"{prefix}self_attn.", layer.query_key_value
            yield f"{prefix}self_attn.", layer.attention_output
            if layer.attention.query_norm is not None and layer.attention.key_norm is not None:
                yield f"{prefix}self_attn.q_norm.", layer.attention.query_norm
                yield f"{prefix}self_attn.k_norm.", layer.attention.key_norm
            yield f"{prefix}post_attention_layernorm.", layer.mlp_norm
            if isinstance(layer.mlp, SparseMlp):
                yield f"{prefix}mlp.", layer.mlp.experts
            else:
                yield f"{prefix}mlp.", layer.mlp.gate_up
                yield f"{prefix}mlp.", layer.mlp.down
        yield "model.norm.", self.norm
        yield "", self.head

    def forward(self, batch: Batch) -> ForwardResult:
        """Compute one step's tokens; their keys and values are in the pool afterwards."""
        ops = self._backend
        x = ops.embed(self.embedding, batch)
        for layer in self.layers:
            qkv = ops.norm_linear(x, layer.attention_norm, layer.query_key_value)
            attended = ops.attend(qkv, layer.attention, batch)
            x = ops.linear_add(attended, layer.attention_output, x)
            if isinstance(layer.mlp, SparseMlp):
                x = ops.moe(x, layer.mlp_norm, layer.mlp.experts)
            else:
                gate_up = ops.norm_linear(x, layer.mlp_norm, layer.mlp.gate_up)
                activated = ops.gate_up_activation(gate_up, "silu")
                x = ops.linear_add(activated, layer.mlp.down, x)
        return ForwardResult(
            hidden=x,
            logits=ops.logits(x, self.norm, self.head, batch),
            pooled_states=ops.pooled_states(x, self.norm, batch),
        )
