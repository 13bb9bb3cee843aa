"""Stop ids and default sampling from `generation_config.json` and `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trunkline.engine.checkpoint import CheckpointError, GenerationDefaults

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def parse_generation(
    generation: Mapping[str, Any], config: Mapping[str, Any], source: str
) -> GenerationDefaults:
    """All stop ids that the two files name, and the sampling that the model recommends.

    Args:
        generation: the values of generation_config.json, empty if there is none.
        config: the values of config.json.
        source: the model, for messages.

    Raises:
        CheckpointError: a value of the wrong type.
    """
    ids: set[int] = set()
    for values in (generation, config):
        found = values.get("eos_token_id")
        found = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token_id) is int and token_id >= 0 for token_id in found):
            raise CheckpointError(f"{source}: eos_token_id must be token ids, not {found!r}")
        ids.update(found)
    sampling = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{source}: {key} of generation_config.json is {value!r}")
    return GenerationDefaults(eos_token_ids=tuple(sorted(ids)), sampling=sampling)
