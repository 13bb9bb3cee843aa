"""Choosing how to read a model: by what its path is and by the load format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trunkline.engine.checkpoint import Checkpoint, CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.weights import hub
from trunkline.engine.weights.config_json import parse_config
from trunkline.engine.weights.default_model import DEFAULT_MODEL, default_model_path
from trunkline.engine.weights.dummy import DummyWeights
from trunkline.engine.weights.generation_config import parse_generation
from trunkline.engine.weights.gguf_checkpoint import (
    GgufTokenizerSource,
    GgufWeights,
    gguf_config,
    open_gguf,
)
from trunkline.engine.weights.gguf_config import read_generation
from trunkline.engine.weights.json_files import read_object, read_optional_object
from trunkline.engine.weights.overrides import OverriddenValues, parse_overrides
from trunkline.engine.weights.pytorch_files import PytorchFiles
from trunkline.engine.weights.safetensors_files import SafetensorsFiles
from trunkline.engine.weights.shards import find_shards
from trunkline.engine.weights.sources import OpenedCheckpoint, TokenizerSource, WeightSource
from trunkline.engine.weights.tokenizer_files import TokenizerFiles

GGUF_SUFFIX = ".gguf"


def open_checkpoint(options: ModelOptions) -> Checkpoint:
    """Open the model that `options` name, without reading weights or importing torch.

    Configuration and the list of tensors (except of PyTorch files, which cannot be listed cheaply)
    are checked here; tokenizer and chat template when they are first asked for.

    Raises:
        CheckpointError: no such model, or one that cannot be served; the message names file, tensor
            or key, and the remedy.
    """
    overrides = parse_overrides(options.json_model_override_args)
    path = _locate(options)
    if path.is_dir():
        checkpoint, weights = _open_directory(path, options, overrides)
    else:
        checkpoint, weights = _open_gguf(path, options, overrides)
    if not isinstance(weights, PytorchFiles):
        _ = checkpoint.tensor_names
    return checkpoint


def is_model_from_hub(options: ModelOptions) -> bool:
    """Whether the model is no local one."""
    path = options.model_path
    return path is not None and not Path(path).expanduser().exists()


def is_tokenizer_from_hub(options: ModelOptions) -> bool:
    """Whether a tokenizer is given that is no local one."""
    path = options.tokenizer_path
    return path is not None and not Path(path).expanduser().exists()


def _locate(options: ModelOptions) -> Path:
    """The model's directory or .gguf file; hub models and the default are fetched."""
    if options.model_path is None:
        return default_model_path()
    path = Path(options.model_path).expanduser()
    if not path.exists():
        if path.suffix == GGUF_SUFFIX or not hub.looks_like_hub_id(options.model_path):
            raise CheckpointError(
                f"there is no file or directory {options.model_path!r}; give a Hugging Face "
                "directory, a .gguf file or a hub id (owner/model)"
            )
        return hub.fetch(
            options.model_path, options.load_format, options.revision, options.download_dir
        )
    if path.is_dir() and (options.load_format == "gguf" or not (path / "config.json").exists()):
        return _only_gguf(path)
    if path.is_file() and path.suffix != GGUF_SUFFIX:
        raise CheckpointError(f"{path} is neither a directory nor a .gguf file")
    return path


def _only_gguf(directory: Path) -> Path:
    files = sorted(directory.glob(f"*{GGUF_SUFFIX}"))
    if not files:
        raise CheckpointError(f"{directory} has neither a config.json nor a .gguf file")
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise CheckpointError(f"{directory} has several .gguf files: {names}; give one by its path")
    return files[0]


def _open_directory(
    directory: Path, options: ModelOptions, overrides: dict[str, Any]
) -> tuple[OpenedCheckpoint, WeightSource]:
    values = OverriddenValues(read_object(directory / "config.json"), overrides)
    config = parse_config(values, str(directory / "config.json"))
    generation = parse_generation(
        read_optional_object(directory / "generation_config.json"), values, str(directory)
    )
    values.refuse_unread()
    weights = _directory_weights(directory, options.load_format, config)
    checkpoint = OpenedCheckpoint(
        source=options.model_path or str(directory),
        config=config,
        generation=generation,
        tokenizer_source=_tokenizer_source(options, TokenizerFiles(directory)),
        weights=weights,
        template_file=_template_file(options),
    )
    return checkpoint, weights


def _directory_weights(directory: Path, load_format: str, config: DecoderConfig) -> WeightSource:
    if load_format == "dummy":
        return DummyWeights(config)
    if load_format in ("auto", "safetensors"):
        shards = find_shards(directory, "model.safetensors", "*.safetensors")
        if shards is not None:
            return SafetensorsFiles(shards)
    if load_format in ("auto", "pt"):
        shards = find_shards(directory, "pytorch_model.bin", "pytorch_model*.bin")
        if shards is not None:
            return PytorchFiles(shards)
    kinds = {
        "auto": "*.safetensors or pytorch_model*.bin",
        "safetensors": "*.safetensors",
        "pt": "pytorch_model*.bin",
    }
    raise CheckpointError(f"{directory} has no weights: no {kinds[load_format]}")


def _open_gguf(
    path: Path, options: ModelOptions, overrides: dict[str, Any]
) -> tuple[OpenedCheckpoint, WeightSource]:
    if options.load_format not in ("auto", "gguf", "dummy"):
        raise CheckpointError(f"{path} cannot be loaded with load format {options.load_format!r}")
    file = open_gguf(path)
    config = gguf_config(file, overrides)
    dummy = options.load_format == "dummy"
    weights = DummyWeights(config) if dummy else GgufWeights(file, config.head_dim)
    checkpoint = OpenedCheckpoint(
        source=options.model_path or DEFAULT_MODEL.name,
        config=config,
        generation=read_generation(file),
        tokenizer_source=_tokenizer_source(options, GgufTokenizerSource(file)),
        weights=weights,
        template_file=_template_file(options),
    )
    return checkpoint, weights


def _tokenizer_source(options: ModelOptions, own: TokenizerSource) -> TokenizerSource:
    if options.tokenizer_path is None:
        return own
    path = Path(options.tokenizer_path).expanduser()
    if not path.exists() and hub.looks_like_hub_id(options.tokenizer_path):
        path = hub.fetch(options.tokenizer_path, "dummy", None, options.download_dir)
    if not path.exists():
        raise CheckpointError(f"there is no tokenizer at {options.tokenizer_path!r}")
    if path.suffix == GGUF_SUFFIX:
        return GgufTokenizerSource(open_gguf(path))
    return TokenizerFiles(path)


def _template_file(options: ModelOptions) -> Path | None:
    return None if options.chat_template is None else Path(options.chat_template).expanduser()
