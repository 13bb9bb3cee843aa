"""Messages made of content blocks, as chat messages.

Knows nothing of templates: what a model's template makes of a message is `chat_template.py`'s part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from trunkline.engine.validation import RequestError, shown

BLOCKS: Final = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


def chat_messages(system: Any, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The chat that a model is asked to go on with.

    Turns of one role that follow each other become one message, its text blocks lines of their own
    (the assistant's are joined as they are); tool results become messages of the role `tool`,
    thoughts and tool calls parts of the assistant's message.

    Raises:
        RequestError: something is malformed, of a type that is not supported, or a result names no
            call before it.
    """
    chat = _Chat()
    if system is not None:
        chat.add_text("system", _blocks(system, "system", "system"))
    if not messages:
        raise RequestError("messages must have at least one entry, got none.", "messages")
    for index, message in enumerate(messages):
        chat.add(message, f"messages[{index}]")
    return chat.messages


def is_prefill(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the answer goes on inside the last message of the chat.

    Raises:
        RequestError: it would have to, but that message ends with tool calls.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise RequestError(
            "messages: the last message calls tools; their tool_result blocks must follow.",
            "messages",
        )
    return True


class _Chat:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_names: dict[str, str] = {}

    def add(self, message: Any, name: str) -> None:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in tuple(BLOCKS):
            raise RequestError(
                f"{name}.role must be one of {', '.join(BLOCKS)}, got {shown(role)}.",
                f"{name}.role",
            )
        blocks = _blocks(message.get("content"), f"{name}.content", role)
        if role == "assistant":
            self._add_assistant(blocks, f"{name}.content")
        elif role == "user":
            self._add_user(blocks, f"{name}.content")
        else:
            self.add_text(role, blocks)

    def add_text(self, role: str, blocks: Sequence[dict[str, Any]]) -> None:
        text = "\n".join(block["text"] for block in blocks)
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role:
            last["content"] += f"\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _add_user(self, blocks: Sequence[dict[str, Any]], name: str) -> None:
        for index, block in enumerate(blocks):
            if block["type"] == "text":
                self.add_text("user", [block])
            else:
                self._add_result(block, f"{name}[{index}]")
        if not blocks:
            self.add_text("user", [])

    def _add_result(self, block: dict[str, Any], name: str) -> None:
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or call_id not in self._call_names:
            raise RequestError(
                f"{name}.tool_use_id must name a tool_use block before it, got {shown(call_id)}.",
                f"{name}.tool_use_id",
            )
        content = block.get("content")
        texts = [] if content is None else _blocks(content, f"{name}.content", "system")
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": self._call_names[call_id],
                "content": "".join(text["text"] for text in texts),
            }
        )

    def _add_assistant(self, blocks: Sequence[dict[str, Any]], name: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        for index, block in enumerate(blocks):
            match block["type"]:
                case "text":
                    last["content"] += block["text"]
                case "thinking":
                    thoughts = [last.get("reasoning_content"), block["thinking"]]
                    last["reasoning_content"] = "\n".join(one for one in thoughts if one)
                case "tool_use":
                    call = self._call(block, f"{name}[{index}]")
                    last.setdefault("tool_calls", []).append(call)

    def _call(self, block: dict[str, Any], name: str) -> dict[str, Any]:
        call_id = _string(block, "id", name)
        function = _string(block, "name", name)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{name}.input must be an object, got {shown(arguments)}.", f"{name}.input"
            )
        self._call_names[call_id] = function
        text = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": function, "arguments": text},
        }


def _blocks(content: Any, name: str, role: str) -> list[dict[str, Any]]:
    """The content blocks of a message, checked as far as they are text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(
            f"{name} must be a string or a list of content blocks, got {shown(content)}.", name
        )
    for index, block in enumerate(content):
        place = f"{name}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in BLOCKS[role]:
            raise RequestError(
                f"{place} is of type {shown(kind)}: here this server takes "
                f"{', '.join(BLOCKS[role])}.",
                place,
            )
        if kind in ("text", "thinking"):
            _string(block, kind, place)
    return content


def _string(block: dict[str, Any], field: str, name: str) -> str:
    text = block.get(field)
    if not isinstance(text, str):
        raise RequestError(
            f"{name}.{field} must be a string, got {shown(text)}.", f"{name}.{field}"
        )
    return text
