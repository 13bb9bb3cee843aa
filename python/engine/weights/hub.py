"""Fetching a model by its hub id into the hub client's cache."""

from __future__ import annotations

import re
from pathlib import Path

from trunkline.engine.checkpoint import CheckpointError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHT_FILES = {
    "auto": ("*.safetensors",),
    "safetensors": ("*.safetensors",),
    "pt": ("*.bin",),
    "dummy": (),
}
# Other formats of the same weights, and files of other programs
_IGNORED = (
    "consolidated*",
    "adapter*",
    "training_args.bin",
    "*/*.json",
    "*/*.safetensors",
    "*/*.bin",
)


def looks_like_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id (owner/model)."""
    return _REPOSITORY.fullmatch(name) is not None and not name.startswith(".")


def fetch(name: str, load_format: str, revision: str | None, download_dir: str | None) -> Path:
    """Directory with the files of hub model `name` that `load_format` needs, fetched if necessary.

    Raises:
        CheckpointError: there is no such model or revision, it may not be read, or the hub cannot
            be reached and the cache does not hold it.
    """
    if load_format not in _WEIGHT_FILES:
        raise CheckpointError(
            f"load format {load_format!r} needs a local file: download the one that you want from "
            f"{name} and give its path"
        )
    directory = _snapshot(name, _WEIGHT_FILES[load_format], revision, download_dir)
    if load_format == "auto" and not any(directory.glob("*.safetensors")):
        directory = _snapshot(name, _WEIGHT_FILES["pt"], revision, download_dir)
    return directory


def _snapshot(
    name: str, weight_files: tuple[str, ...], revision: str | None, download_dir: str | None
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        path = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*_SMALL_FILES, *weight_files],
            ignore_patterns=list(_IGNORED),
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"no directory or file {name!r} here, and the hub model of that name{at} could not be "
            f"fetched; give a directory, a .gguf file or a hub id; a private model needs HF_TOKEN; "
            "without network the hub cache must already hold the model. The hub's words: "
            + " ".join(str(error).split())
        ) from error
    return Path(path)
