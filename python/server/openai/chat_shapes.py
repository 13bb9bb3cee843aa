"""Pieces of an answer in the shapes of chat completions: a message, or the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trunkline.server.openai.pieces import Arguments, Content, Piece, Reasoning, ToolCall


def whole_message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The message that all pieces of a sample make; its content is null beside calls alone."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCall(index, call_id, name):
                calls.append(_call(index, call_id, name))
            case Arguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(content) if content or not calls else None,
        "refusal": None,
        "reasoning_content": "".join(reasoning) or None,
    }
    if calls:
        message["tool_calls"] = calls
    return message


def deltas(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The deltas of a stream for new pieces; neighbours of one kind come in one.

    A call's first delta has its id, type and name; those after it have its index and arguments
    only.
    """
    result: list[dict[str, Any]] = []
    last: tuple[str, int] | None = None
    for piece in pieces:
        match piece:
            case ToolCall(index, call_id, name):
                key = ("call", index)
                result.append({"tool_calls": [_call(index, call_id, name)]})
            case Arguments(index, text):
                key = ("arguments", index)
                if key == last:
                    result[-1]["tool_calls"][0]["function"]["arguments"] += text
                else:
                    result.append(
                        {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
                    )
            case Content(text) | Reasoning(text):
                field = "content" if isinstance(piece, Content) else "reasoning_content"
                key = (field, 0)
                if key == last:
                    result[-1][field] += text
                else:
                    result.append({field: text})
        last = key
    return result


def _call(index: int, call_id: str, name: str) -> dict[str, Any]:
    return {
        "index": index,
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
