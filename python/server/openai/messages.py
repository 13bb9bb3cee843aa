"""The messages of a chat, checked before the template sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trunkline.engine.chat_template import ROLES
from trunkline.engine.validation import RequestError, shown

_MAX_MESSAGES: Final = 16_384


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check roles and contents. The template joins text parts and maps `developer` to `system`.

    Raises:
        RequestError: there is no message, or one has an unknown role or a content that is no text.
    """
    if not 1 <= len(messages) <= _MAX_MESSAGES:
        raise RequestError(
            f"messages must have 1 to {_MAX_MESSAGES} entries, got {len(messages)}.", "messages"
        )
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                f"{name}.role must be one of {', '.join(ROLES)}, got {shown(role)}.",
                f"{name}.role",
            )
        _check_content(message, f"{name}.content")


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last of checked messages."""
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def _check_content(message: Mapping[str, Any], name: str) -> None:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant":
            return
        raise RequestError(f"{name} must be a string or a list of text parts, got null.", name)
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(
            f"{name} must be a string or a list of text parts, got {shown(content)}.", name
        )
    for index, part in enumerate(content):
        _check_part(part, f"{name}[{index}]")


def _check_part(part: Any, name: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise RequestError(
            f"{name} is of type {shown(kind)}: this model takes text parts only.", name
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{name}.text must be a string.", name)
