"""Chats with tools in the shape that a model's template takes.

Calls and their results are checked; their ids become what the format wants; and where the template
knows nothing of tools, they are told to the model as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from trunkline.engine.validation import RequestError, shown
from trunkline.server.openai.tools.json_text import parsed, written

Message = Mapping[str, Any]
NewId = Callable[[int, str, str], str]  # position among all calls, the tool's name, the id as sent

_HINT: Final = """\
# Tools

You can call these functions:

{tools}

To call one, write this and nothing else, once per call:

{example}"""


def check_calls(messages: Sequence[Message]) -> None:
    """Check the calls in a chat, and that every result belongs to one.

    Raises:
        RequestError: a call is malformed, or a result names none that came before it.
    """
    known: set[str] = set()
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if message.get("function_call") is not None:
            raise RequestError(
                f"{name}.function_call is not supported: use tool_calls.", f"{name}.function_call"
            )
        calls = message.get("tool_calls")
        if calls is not None:
            known.update(_call_ids(message, calls, f"{name}.tool_calls"))
        answered = message.get("tool_call_id")
        if answered is not None and not isinstance(answered, str):
            raise RequestError(
                f"{name}.tool_call_id must be a string, got {shown(answered)}.",
                f"{name}.tool_call_id",
            )
        if message["role"] == "tool" and answered is not None and answered not in known:
            raise RequestError(
                f"{name}.tool_call_id is {shown(answered)}, which no call before it has.",
                f"{name}.tool_call_id",
            )


def _call_ids(message: Message, calls: Any, path: str) -> list[str]:
    if message["role"] != "assistant" or not isinstance(calls, list):
        raise RequestError(f"{path} must be a list, and only assistants have calls.", path)
    ids = []
    for index, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), "arguments": str() | dict()}}:
                pass
            case _:
                raise RequestError(
                    f"{path}[{index}] must have a function with a name and arguments, as JSON "
                    "text.",
                    f"{path}[{index}]",
                )
        if call.get("type", "function") != "function":
            raise RequestError(f'{path}[{index}].type must be "function".', f"{path}[{index}].type")
        call_id = call.get("id")
        if call_id is not None:
            if not isinstance(call_id, str):
                raise RequestError(
                    f"{path}[{index}].id must be a string, got {shown(call_id)}.",
                    f"{path}[{index}].id",
                )
            ids.append(call_id)
    return ids


def short_id(_: int, __: str, call_id: str) -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def numbered_id(position: int, name: str, _: str) -> str:
    """The name and the position among all calls, as Kimi knows them."""
    return f"functions.{name}:{position}"


def with_ids(messages: Sequence[Message], new_id: NewId) -> list[Message]:
    """The same chat, with other ids of calls and of their results."""
    position = 0
    ids: dict[str, str] = {}
    result: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                call_id = call.get("id") or f"call {position}"
                ids[call_id] = new_id(position, call["function"]["name"], call_id)
                calls.append({**call, "id": ids[call_id]})
                position += 1
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        result.append(message)
    return result


def with_hint(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], example: str, role: str
) -> list[Message]:
    """The same chat, in which a message also says what can be called and how.

    Args:
        messages: the chat.
        tools: their descriptions.
        example: of a call.
        role: of that message: system, or user for models that take no system message.
    """
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    hint = _HINT.format(tools=lines, example=example)
    in_front = role == "user"
    roles = ("user",) if in_front else ("system", "developer")
    places = range(len(messages) if in_front else 1)
    index = next((place for place in places if messages[place]["role"] in roles), None)
    if index is None:
        return [{"role": role, "content": hint}, *messages]
    told = list(messages)
    told[index] = {**told[index], "content": _both(told[index].get("content"), hint, in_front)}
    return told


def _both(content: Any, text: str, in_front: bool) -> Any:
    """A message's content with more text, before or after its own."""
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        return [part, *content] if in_front else [*content, part]
    both = (text, content) if in_front else (content, text)
    return "\n\n".join(part for part in both if part)


def as_text(messages: Sequence[Message]) -> list[Message]:
    """The same chat, with calls as an assistant's text and their results as a user's."""
    result: list[Message] = []
    in_results = False
    for message in messages:
        if message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if in_results:
                text = f"{result.pop()['content']}\n{text}"
            result.append({"role": "user", "content": text})
            in_results = True
            continue
        in_results = False
        calls = message.get("tool_calls")
        if calls:
            blocks = [_call_text(call["function"]) for call in calls]
            said = _text(message.get("content"))
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**kept, "content": "\n".join([said, *blocks] if said else blocks)}
        result.append(message)
    return result


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = parsed(arguments)
        except ValueError:  # a model wrote it, and it said so before
            pass
    return hermes_call(function["name"], arguments)


def hermes_call(name: str, arguments: Any) -> str:
    """A call as Hermes writes it."""
    body = f'{{"name": {written(name)}, "arguments": {written(arguments)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(part["text"] for part in content)
    return content or ""
