"""The input of a response: items as clients write them, as they are stored, and as chat messages.

Knows nothing of templates: what a model's template makes of a message is `chat_template.py`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from trunkline.engine.validation import RequestError, shown
from trunkline.server.openai.responses_output import new_id

Item: TypeAlias = dict[str, Any]

ROLES: Final = ("user", "assistant", "system", "developer")
MAX_ITEMS: Final = 16_384
_ID_PREFIX: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def parse_input(value: Any, find: Callable[[str], Item | None]) -> list[Item]:
    """The items of `input`, each in its full form with an id.

    Args:
        value: a text, or a list of items; None is an empty list.
        find: looks up the item that an `item_reference` names.

    Raises:
        RequestError: an item is malformed, of a type that is not supported, or not there.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError(f"input must be a string or a list, got {shown(value)}.", "input")
    if not len(value) <= MAX_ITEMS:
        raise RequestError(f"input must have at most {MAX_ITEMS} items, got {len(value)}.", "input")
    return [_parse_item(item, f"input[{index}]", find) for index, item in enumerate(value)]


def _parse_item(item: Any, name: str, find: Callable[[str], Item | None]) -> Item:
    if not isinstance(item, dict):
        raise RequestError(f"{name} must be an object, got {shown(item)}.", name)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "item_reference":
        item_id = _string(item, "id", name)
        found = find(item_id)
        if found is None:
            raise RequestError(
                f"{name} refers to the item {shown(item_id)}, which is not stored (any more); "
                "send the item itself.",
                f"{name}.id",
            )
        return found
    parse = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parse is None:
        raise RequestError(
            f"{name} is of type {shown(kind)}: this server takes {', '.join(_PARSERS)} and "
            "item_reference.",
            f"{name}.type",
        )
    given = item.get("id")
    item_id = given if isinstance(given, str) and given else new_id(_ID_PREFIX[kind])
    return {"type": kind, "id": item_id, "status": "completed", **parse(item, name)}


def _parse_message(item: Item, name: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{name}.role must be one of {', '.join(ROLES)}, got {shown(role)}.", f"{name}.role"
        )
    content = item.get("content")
    if isinstance(content, str):
        content = [
            {"type": "output_text" if role == "assistant" else "input_text", "text": content}
        ]
    if not isinstance(content, list):
        raise RequestError(
            f"{name}.content must be a string or a list of parts, got {shown(content)}.",
            f"{name}.content",
        )
    parts = [
        _parse_part(part, f"{name}.content[{index}]", role) for index, part in enumerate(content)
    ]
    return {"role": role, "content": parts}


def _parse_part(part: Any, name: str, role: str) -> Item:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal" and role == "assistant":
        return {"type": "refusal", "refusal": _string(part, "refusal", name)}
    if kind not in ("input_text", "output_text", "text"):
        raise RequestError(
            f"{name} is of type {shown(kind)}: this model takes text parts only.", f"{name}.type"
        )
    text = _string(part, "text", name)
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _parse_reasoning(item: Item, name: str) -> Item:
    parsed: Item = {}
    for field, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = item.get(field) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise RequestError(f"{name}.{field} must be a list of parts.", f"{name}.{field}")
        parsed[field] = [
            {"type": kind, "text": _string(part, "text", f"{name}.{field}[{index}]")}
            for index, part in enumerate(parts)
        ]
    return parsed


def _parse_call(item: Item, name: str) -> Item:
    return {field: _string(item, field, name) for field in ("call_id", "name", "arguments")}


def _parse_call_output(item: Item, name: str) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        output = [
            _parse_part(part, f"{name}.output[{index}]", "user")
            for index, part in enumerate(output)
        ]
    elif not isinstance(output, str):
        raise RequestError(
            f"{name}.output must be a string or a list of parts, got {shown(output)}.",
            f"{name}.output",
        )
    return {"call_id": _string(item, "call_id", name), "output": output}


def _string(value: Mapping[str, Any], field: str, name: str) -> str:
    text = value.get(field)
    if not isinstance(text, str):
        raise RequestError(
            f"{name}.{field} must be a string, got {shown(text)}.", f"{name}.{field}"
        )
    return text


_PARSERS: Final[Mapping[str, Callable[[Item, str], Item]]] = {
    "message": _parse_message,
    "reasoning": _parse_reasoning,
    "function_call": _parse_call,
    "function_call_output": _parse_call_output,
}


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The chat that a model is asked to go on with.

    Reasoning and tool calls become parts of the assistant's message beside them; reasoning that no
    such message follows is left out.

    Raises:
        RequestError: an output names a call that does not come before it.
    """
    chat = _Chat()
    if instructions is not None:
        chat.messages.append({"role": "system", "content": instructions})
    for item in items:
        chat.add(item)
    return chat.messages


class _Chat:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_names: dict[str, str] = {}
        self._thoughts: list[str] = []

    def add(self, item: Item) -> None:
        match item["type"]:
            case "reasoning":
                parts = item["content"] or item["summary"]
                self._thoughts += [part["text"] for part in parts]
            case "message" if item["role"] == "assistant":
                texts = [part.get("text", part.get("refusal")) for part in item["content"]]
                self._assistant("".join(texts))
            case "message":
                parts = [{"type": "text", "text": part["text"]} for part in item["content"]]
                self._add({"role": item["role"], "content": parts})
            case "function_call":
                self._call(item)
            case "function_call_output":
                self._output(item)

    def _add(self, message: dict[str, Any]) -> None:
        self._thoughts = []
        self.messages.append(message)

    def _assistant(self, content: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        self._add(message)
        return message

    def _call(self, item: Item) -> None:
        self._call_names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._thoughts:
            last = self._assistant("")
        last.setdefault("tool_calls", []).append(call)

    def _output(self, item: Item) -> None:
        call_id, output = item["call_id"], item["output"]
        if call_id not in self._call_names:
            raise RequestError(
                f"input: the function_call_output with call_id {shown(call_id)} follows no "
                "function_call with that call_id.",
                "input",
            )
        if not isinstance(output, str):
            output = "".join(part["text"] for part in output)
        message = {"role": "tool", "tool_call_id": call_id, "content": output}
        self._add({**message, "name": self._call_names[call_id]})
