"""The reasoning parsers by name, and which one a chat template calls for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.server.openai.reasoning.think import Tags

HARMONY: Final = "gpt-oss"
_THINK: Final = Tags("<think>", "</think>")
_KIMI: Final = Tags("◁think▷", "◁/think▷")
_MISTRAL: Final = Tags("[THINK]", "[/THINK]")

# None: the format of calls holds the reasoning too.
PARSERS: Final[Mapping[str, Tags | None]] = {
    "think": _THINK,
    "deepseek-r1": _THINK,
    "deepseek-v3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK,
    "glm": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "kimi": _KIMI,
    "mistral": _MISTRAL,
    HARMONY: None,
}
_SIGNS: Final = (
    ("<|channel|>", HARMONY),
    (_KIMI.end, "kimi"),
    (_MISTRAL.end, "mistral"),
    (_THINK.end, "think"),
    (_THINK.begin, "think"),
)


def detect(template: str) -> str | None:
    """The parser for a model with this chat template; None where it does not speak of reasoning."""
    return next((name for sign, name in _SIGNS if sign in template), None)
