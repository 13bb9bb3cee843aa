"""The decoder: one model for all families that differ only in the flags of `DecoderConfig`.

x = embedding[tokens]
per layer:  x += o(attention(qkv(norm(x))));  x += mlp(norm(x))
mlp(y) = down(act(gate(y)) * up(y)), or the weighted sum of a token's experts, which are the same
logits = head(norm(x))

With post norms a layer is  x += norm(o(attention(...)));  x += norm(mlp(norm(x))).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch

from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.models.rotary import rotary_spec
from trunkline.kernels import (
    Activation,
    ActivationName,
    AttentionSpec,
    Backend,
    Batch,
    ExpertsSpec,
    KvScales,
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
    attention_post_norm: Weight | None
    mlp_norm: Weight
    mlp: DenseMlp | SparseMlp
    mlp_post_norm: Weight | None


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
        self.activation = _activation(config)
        self.config = config
        self._backend = backend
        self._rotary = backend.create_rotary(rotary_spec(config, num_positions))
        self._sliding_rotary = self._rotary
        if config.sliding_rope is not None:
            spec = rotary_spec(config, num_positions, config.sliding_rope)
            self._sliding_rotary = backend.create_rotary(spec)
        # The factor is rounded to the dtype, as these models are used to; its products are not.
        scale = torch.tensor(config.embedding_scale).to(backend.dtype).item()
        self.embedding = backend.create_embedding(config.vocab_size, config.hidden_size, scale)
        self.layers = [self._create_layer(index) for index in range(config.num_layers)]
        self.norm = self._norm(config.hidden_size)
        if tied:
            self.head = backend.create_tied_linear(self.embedding)
        else:
            self.head = self._linear(config.hidden_size, LinearPart("lm_head", config.vocab_size))

    def _linear(self, in_features: int, *parts: LinearPart) -> Weight:
        return self._backend.create_linear(LinearSpec(in_features, parts))

    def _norm(self, width: int) -> Weight:
        return self._backend.create_norm(width, self.config.rms_norm_eps, self.config.norm_offset)

    def _create_layer(self, index: int) -> DecoderLayer:
        config = self.config
        hidden = config.hidden_size
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        slides = config.sliding_layers[index] if config.sliding_layers else True
        attention = AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary=self._sliding_rotary if slides else self._rotary,
            window=config.sliding_window if slides else None,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            query_norm=self._norm(config.head_dim) if config.qk_norm else None,
            key_norm=self._norm(config.head_dim) if config.qk_norm else None,
            kv_scales=KvScales() if config.kv_scales else None,
        )
        return DecoderLayer(
            attention_norm=self._norm(hidden),
            query_key_value=self._linear(
                hidden,
                LinearPart("q_proj", query_size, config.qkv_bias),
                LinearPart("k_proj", kv_size, config.qkv_bias),
                LinearPart("v_proj", kv_size, config.qkv_bias),
            ),
            attention=attention,
            attention_output=self._linear(query_size, LinearPart("o_proj", hidden, config.o_bias)),
            attention_post_norm=self._norm(hidden) if config.post_norms else None,
            mlp_norm=self._norm(hidden),
            mlp=self._create_mlp(index),
            mlp_post_norm=self._norm(hidden) if config.post_norms else None,
        )

    def _create_mlp(self, layer: int) -> DenseMlp | SparseMlp:
        config = self.config
        experts = config.experts_of(layer)
        if experts is not None:
            if config.post_norms:
                raise ValueError(f"{config.architecture}: post norms of experts are not supported")
            spec = ExpertsSpec(
                hidden_size=config.hidden_size,
                width=experts.intermediate_size,
                num_experts=experts.num_experts,
                top_k=experts.top_k,
                renormalise=experts.renormalise,
                activation=self.activation,
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
            if layer.attention.kv_scales is not None:
                yield f"{prefix}self_attn.", layer.attention.kv_scales
            # The name of the one norm between attention and MLP, or of the first of two.
            if layer.attention_post_norm is not None and layer.mlp_post_norm is not None:
                yield f"{prefix}post_attention_layernorm.", layer.attention_post_norm
                yield f"{prefix}pre_feedforward_layernorm.", layer.mlp_norm
                yield f"{prefix}post_feedforward_layernorm.", layer.mlp_post_norm
            else:
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
            x = self._linear_add(attended, layer.attention_output, layer.attention_post_norm, x)
            if isinstance(layer.mlp, SparseMlp):
                x = ops.moe(x, layer.mlp_norm, layer.mlp.experts)
            else:
                gate_up = ops.norm_linear(x, layer.mlp_norm, layer.mlp.gate_up)
                activated = ops.gate_up_activation(gate_up, self.activation)
                x = self._linear_add(activated, layer.mlp.down, layer.mlp_post_norm, x)
        return ForwardResult(
            hidden=x,
            logits=ops.logits(x, self.norm, self.head, batch, self.config.logit_soft_cap),
            pooled_states=ops.pooled_states(x, self.norm, batch),
        )

    def _linear_add(
        self, x: Activation, weight: Weight, post_norm: Weight | None, residual: Activation
    ) -> Activation:
        ops = self._backend
        if post_norm is None:
            return ops.linear_add(x, weight, residual)
        return ops.norm_add(ops.linear(x, weight), post_norm, residual)


def _activation(config: DecoderConfig) -> ActivationName:
    for name in get_args(ActivationName):
        if config.hidden_act == name:
            return name  # type: ignore[no-any-return]
    raise ValueError(
        f"hidden_act {config.hidden_act!r} of {config.architecture} is not supported; "
        f"known: {', '.join(get_args(ActivationName))}"
    )
