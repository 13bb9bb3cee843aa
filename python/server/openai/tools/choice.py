"""What a request says about tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from trunkline.engine.validation import RequestError, shown

MAX_TOOLS: Final = 512
TOOL_NAME: Final = r"^[A-Za-z0-9_.:/-]{1,128}$"
TOOL_MODES: Final = ("none", "auto", "required")
_NAME: Final = re.compile(TOOL_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Tools that a model may or must call.

    `tools` are as the client sent them, for the chat template; `schemas` holds the parameters of
    those that may be called, in their order, and `strict` the names of those whose arguments must
    follow them. With `must_call` the answer is a call, else it may be one.
    """

    tools: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str]
    must_call: bool
    parallel: bool


def parse_tool_choice(
    tools: Any, tool_choice: Any = None, parallel_tool_calls: bool | None = None
) -> ToolChoice | None:
    """Check what a body says about tools, in the shapes of chat completions.

    Returns:
        None where no tool may be called: there is none, or `tool_choice` is none.

    Raises:
        RequestError: a tool is malformed, or the choice does not fit the tools.
    """
    functions = _functions(tools)
    mode, allowed = _mode(tool_choice)
    if not functions:
        if mode == "required":
            raise RequestError(
                f"tool_choice is {shown(tool_choice)}, but there are no tools.", "tool_choice"
            )
        return None
    if mode == "none":
        return None
    for name in allowed or ():
        if name not in functions:
            raise RequestError(
                f"tool_choice names {name[:200]!r}; tools has {', '.join(functions)[:200]}.",
                "tool_choice",
            )
    named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
    chosen = {name: one for name, one in functions.items() if allowed is None or name in allowed}
    return ToolChoice(
        tools=list(tools),
        schemas={name: one.get("parameters") or {} for name, one in chosen.items()},
        strict=frozenset(name for name, one in chosen.items() if one.get("strict")),
        must_call=mode == "required",
        parallel=parallel_tool_calls is not False and not named,
    )


def _functions(tools: Any) -> dict[str, Mapping[str, Any]]:
    """The functions by name."""
    if tools is None:
        return {}
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} tools.", "tools")
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise RequestError(
                f'{path} must be an object with type "function", got type {shown(kind)}.', path
            )
        function = tool.get("function")
        _check_function(function, f"{path}.function")
        name = function["name"]
        if name in functions:
            raise RequestError(
                f"{path}.function.name {name!r} is there twice.", f"{path}.function.name"
            )
        functions[name] = function
    return functions


def _check_function(function: Any, path: str) -> None:
    if not isinstance(function, dict):
        raise RequestError(f"{path} must be an object, got {shown(function)}.", path)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{path}.name must be 1 to 128 letters, digits or _ . : / -, got {shown(name)}.",
            f"{path}.name",
        )
    for key, kind in (("description", str), ("strict", bool), ("parameters", dict)):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            words = {str: "a string", bool: "true or false", dict: "a JSON Schema"}[kind]
            raise RequestError(
                f"{path}.{key} must be {words}, got {shown(value)}.", f"{path}.{key}"
            )
    if function.get("parameters"):
        _check_parameters(function["parameters"], f"{path}.parameters")


def _check_parameters(schema: Mapping[str, Any], path: str) -> None:
    kind = schema.get("type", "object")
    if kind != "object":
        raise RequestError(f'{path}.type must be "object", got {shown(kind)}.', f"{path}.type")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(
        isinstance(one, dict | bool) for one in properties.values()
    ):
        raise RequestError(
            f"{path}.properties must be an object of JSON Schemas.", f"{path}.properties"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise RequestError(f"{path}.required must be a list of names.", f"{path}.required")


def _mode(
    tool_choice: Any,
) -> tuple[Literal["none", "auto", "required"], Sequence[str] | None]:
    """The mode, and the names that are allowed; None: all."""
    if tool_choice is None:
        return "auto", None
    if tool_choice in TOOL_MODES:
        return tool_choice, None
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode}}:
            tools = tool_choice["allowed_tools"].get("tools")
            match tools:
                case [*entries] if entries and all(_named(one) for one in entries):
                    return mode, [one["function"]["name"] for one in entries]
    raise RequestError(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": '
        '{"name": ...}} or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or '
        f'"required", "tools": [...]}}}}, got {shown(tool_choice)}.',
        "tool_choice",
    )


def _named(entry: Any) -> bool:
    match entry:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False
