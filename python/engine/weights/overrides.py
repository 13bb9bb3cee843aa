"""`--json-model-override-args`: keys of a config.json that the user sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.suggestions import did_you_mean


def parse_overrides(text: str) -> dict[str, Any]:
    """The keys that are set, and their values.

    Raises:
        CheckpointError: the text is no JSON object.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"--json-model-override-args is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError("--json-model-override-args must be a JSON object")
    return values


class OverriddenValues(dict[str, Any]):
    """The values of a config.json with those of the user; `get` notes what is asked for."""

    def __init__(self, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        """Merge them; an override replaces a value as a whole."""
        super().__init__({**values, **overrides})
        self._overrides = overrides
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """See `dict`."""
        self._read.add(key)
        return super().get(key, default)

    def refuse_unread(self) -> None:
        """Refuse overrides that nothing has asked for.

        Raises:
            CheckpointError: there is one: misspelt, or without effect for this model.
        """
        for key in self._overrides:
            if key not in self._read:
                raise CheckpointError(
                    f"--json-model-override-args sets {key!r}, which changes nothing for this "
                    f"model (it is not read, or another key stands in its place): leave it out"
                    f"{did_you_mean(key, self._read)}"
                )
