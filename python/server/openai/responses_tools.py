"""Tools of `/v1/responses` in the shapes of chat completions."""

from __future__ import annotations

from typing import Any, Final

from trunkline.engine.validation import RequestError, shown

TOOL_KEYS: Final = frozenset(("type", "name", "description", "parameters", "strict"))


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
    fields = TOOL_KEYS - {"type"}
    function = {name: value for name, value in tool.items() if name in fields and value is not None}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Any) -> str | dict[str, Any] | None:
    """`tool_choice`, with the names of functions nested.

    Raises:
        RequestError: it is none of none, auto, required, a function and allowed tools.
    """
    if choice is None or choice in ("none", "auto", "required"):
        return choice  # type: ignore[no-any-return]
    match choice:
        case {"type": "function", "name": str(name)}:
            return _named(name)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            names = [_name(tool) for tool in tools]
            if names and None not in names:
                allowed = {"mode": mode, "tools": [_named(name) for name in names]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
    raise RequestError(
        'tool_choice must be "none", "auto", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}, '
        f"got {shown(choice)}.",
        "tool_choice",
    )


def _name(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    return None


def _named(name: str | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
