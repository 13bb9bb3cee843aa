"""The tensors that a decoder consists of: their names in Hugging Face's spelling and shapes.

One list serves to check a checkpoint before its weights are read and to invent dummy weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.models.config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
MAX_NAMES_SHOWN = 5

Shape = tuple[int, ...]


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor that `config` requires, in the order of the forward pass.

    With tied embeddings there is no `lm_head.weight`.
    """
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_tensors(config: DecoderConfig, layer: int) -> dict[str, Shape]:
    hidden = config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key, hidden, config.qkv_bias),
        "self_attn.v_proj": (key, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.o_bias),
        **_mlp_linears(config, layer),
    }
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.kv_scales:
        shapes["self_attn.k_scale"] = shapes["self_attn.v_scale"] = (1,)
    norms = ["post_attention_layernorm"]
    if config.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms}
    return shapes


def _mlp_linears(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, of a layer's MLP or of its router and experts."""
    experts = config.experts_of(layer)
    if experts is None:
        return _gated_mlp("mlp.", config.hidden_size, config.intermediate_size, config.mlp_bias)
    linears = {"mlp.gate": (experts.num_experts, config.hidden_size, False)}
    for expert in range(experts.num_experts):
        prefix = f"mlp.experts.{expert}."
        linears |= _gated_mlp(prefix, config.hidden_size, experts.intermediate_size, False)
    return linears


def _gated_mlp(
    prefix: str, hidden: int, width: int, bias: bool
) -> dict[str, tuple[int, int, bool]]:
    return {
        f"{prefix}gate_proj": (width, hidden, bias),
        f"{prefix}up_proj": (width, hidden, bias),
        f"{prefix}down_proj": (hidden, width, bias),
    }


def check_tensors(config: DecoderConfig, found: Mapping[str, Shape], source: str) -> None:
    """Compare the tensors of a checkpoint with those that `config` requires.

    A tied model may bring an `lm_head.weight` of the embedding's shape, also in the embedding's
    place.

    Raises:
        CheckpointError: tensors are missing, unexpected or of the wrong shape; names them.
    """
    expected = expected_tensors(config)
    missing = expected.keys() - found.keys()
    if config.tie_word_embeddings and LM_HEAD in found:
        missing -= {EMBEDDING}
    if LM_HEAD in missing and missing == {LM_HEAD}:
        raise CheckpointError(
            f"{source} lacks tensor {LM_HEAD!r}, and its config does not tie word embeddings "
            "(--json-model-override-args '{\"tie_word_embeddings\": true}' does)"
        )
    if missing:
        raise CheckpointError(f"{source} lacks {_listed(missing)}, which its config requires")
    allowed = dict(expected)
    allowed.setdefault(LM_HEAD, expected[EMBEDDING])
    if unexpected := found.keys() - allowed.keys():
        raise CheckpointError(
            f"{source} has {_listed(unexpected)}, for which {config.architecture} has no place"
        )
    for name, shape in allowed.items():
        if found.get(name, shape) != shape:
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {list(found[name])}, the config requires "
                f"{list(shape)}"
            )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(repr(name) for name in ordered[:MAX_NAMES_SHOWN])
    more = f" and {len(ordered) - MAX_NAMES_SHOWN} more" if len(ordered) > MAX_NAMES_SHOWN else ""
    return f"{'tensors' if len(ordered) > 1 else 'tensor'} {shown}{more}"
