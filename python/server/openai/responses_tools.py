"""Tools and formats of `/v1/responses` in the shapes of chat completions."""

from __future__ import annotations

from typing import Any

from trunkline.engine.validation import RequestError, shown


def chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Function tools, nested as chat completions have them.

    Raises:
        RequestError: a tool is malformed, or of a kind that this server does not run.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError(f"tools must be a list, got {shown(tools)}.", "tools")
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _chat_tool(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise RequestError(
            f"{name} is of type {shown(kind)}: only function tools can be offered here.", name
        )
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{name}.name must be a string.", f"{name}.name")
    fields = ("name", "description", "parameters", "strict")
    function = {field: tool[field] for field in fields if tool.get(field) is not None}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Any) -> str | dict[str, Any] | None:
    """`tool_choice`, with the name of a function nested.

    Raises:
        RequestError: it is none of none, auto, required and a function.
    """
    if choice is None or choice in ("none", "auto", "required"):
        return choice  # type: ignore[no-any-return]
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    if is_function and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise RequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "name": ...}, '
        f"got {shown(choice)}.",
        "tool_choice",
    )


def chat_format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as `response_format`: a schema's fields are nested there."""
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
