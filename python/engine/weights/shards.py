"""The files that hold a model's weights in a Hugging Face directory, and their index.

Common to safetensors and PyTorch files: one file, or shards with an index that says which tensor is
in which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.weights.json_files import read_object
from trunkline.engine.weights.layout import Shape

# Derived from the config; old checkpoints carry them along.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Shards:
    """Weight files in order, and what the index, if there is one, expects in them."""

    files: tuple[Path, ...]
    index_path: Path | None = None
    index: Mapping[str, str] | None = None  # tensor name -> file name

    def merged(self, found: Mapping[Path, Mapping[str, Shape]]) -> dict[str, Shape]:
        """The tensors of all files, without derived ones; checked against index and each other.

        Raises:
            CheckpointError: a tensor that is in two files, that the index puts elsewhere or does
                not know, or that the index promises and no file has.
        """
        seen: dict[str, Path] = {}
        for path, names in found.items():
            for name in names:
                if name in seen:
                    raise CheckpointError(
                        f"tensor {name!r} is both in {seen[name]} and in {path.name}"
                    )
                seen[name] = path
                if self.index is not None and self.index.get(name) != path.name:
                    where = self.index.get(name, "nowhere")
                    raise CheckpointError(
                        f"{path} holds tensor {name!r}, which {self.index_path} puts {where}"
                    )
        for name, file_name in (self.index or {}).items():
            if name not in seen:
                raise CheckpointError(
                    f"{self.index_path} puts tensor {name!r} in {file_name}, which does not hold it"
                )
        return {
            name: shape
            for shapes in found.values()
            for name, shape in shapes.items()
            if not name.endswith(DERIVED_SUFFIX)
        }


def find_shards(directory: Path, single: str, pattern: str) -> Shards | None:
    """The weight files of a directory, None if there are none of this kind.

    Args:
        directory: the model.
        single: the name of an unsharded file ("model.safetensors"); `single` + ".index.json" is
            the index of shards.
        pattern: which files are taken where there is neither.

    Raises:
        CheckpointError: an index is unreadable or names a file that is missing.
    """
    if (directory / single).exists():
        return Shards((directory / single,))
    index_path = directory / f"{single}.index.json"
    if not index_path.exists():
        files = sorted(
            path for path in directory.glob(pattern) if not path.name.startswith("consolidated")
        )
        return Shards(tuple(files)) if files else None
    index = read_object(index_path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
    names = sorted(set(index.values()))
    for name in names:
        # The index comes with the model: it may not point out of the directory.
        if Path(name).name != name:
            raise CheckpointError(f"{index_path} names {name!r}, which is not a plain file name")
        if not (directory / name).exists():
            raise CheckpointError(
                f"{directory / name} is missing, but {index_path.name} names it; download it"
            )
    return Shards(tuple(directory / name for name in names), index_path, index)
