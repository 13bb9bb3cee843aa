"""Trunkline: an LLM serving engine.

`Engine` runs a model inside your own process; `engine-serve` (or `python -m trunkline`) serves one
over HTTP. Importing this package is cheap: torch is loaded with the first engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trunkline._core import VERSION as __version__
    from trunkline.engine.chat_template import ChatTemplateError
    from trunkline.engine.checkpoint import CheckpointError
    from trunkline.engine.client import EngineDied, RequestRefused
    from trunkline.engine.engine import Engine
    from trunkline.engine.resources import SettingError
    from trunkline.engine.validation import RequestError

__all__ = [
    "ChatTemplateError",
    "CheckpointError",
    "Engine",
    "EngineDied",
    "RequestError",
    "RequestRefused",
    "SettingError",
    "__version__",
]

_HOMES = {
    "ChatTemplateError": "trunkline.engine.chat_template",
    "CheckpointError": "trunkline.engine.checkpoint",
    "Engine": "trunkline.engine.engine",
    "EngineDied": "trunkline.engine.client",
    "RequestError": "trunkline.engine.validation",
    "RequestRefused": "trunkline.engine.client",
    "SettingError": "trunkline.engine.resources",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("trunkline._core").VERSION
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
