"""The default model as a Hugging Face directory in float32, for programs that read nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from trunkline.engine.weights.default_model import default_model_path
from trunkline.engine.weights.gguf_checkpoint import (
    GgufTokenizerSource,
    GgufWeights,
    gguf_config,
    open_gguf,
)
from trunkline.engine.weights.gguf_config import config_values, read_generation


def export_default_model(directory: Path) -> None:
    """Write configuration, weights as our loader reads them, tokenizer and chat template."""
    file = open_gguf(default_model_path())
    config = gguf_config(file, {})
    tokenizer_source = GgufTokenizerSource(file)
    tokenizer = tokenizer_source.load()
    values = {
        **config_values(file),
        "model_type": file.metadata["general.architecture"],
        "dtype": "float32",
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(read_generation(file).eos_token_ids),
    }
    _write_json(directory / "config.json", values)
    weights = dict(GgufWeights(file, config.head_dim).tensors())
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    templates = tokenizer_source.templates()
    assert templates is not None
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": templates.templates["default"],
        **tokenizer.named_tokens,
    }
    _write_json(directory / "tokenizer_config.json", named)


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2), "utf-8")
