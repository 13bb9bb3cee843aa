"""The body of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from trunkline.engine.native_request import RequestContext
from trunkline.engine.validation import ParsedSampling, RequestError, is_int, shown
from trunkline.server.openai.fields import CommonFields, parse_fields, parse_sampling
from trunkline.server.openai.output import Wishes
from trunkline.server.openai.parsers import Parsers
from trunkline.server.openai.prompt import unread_variables
from trunkline.server.openai.translation import chat_format, unread_keys
from trunkline.server.state import Server

UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "response_format": (),
    "stream_options": ({},),
    "container": (),
    "mcp_servers": ([],),
}
THINKING: Final = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
# Of `cache_control` there is nothing to tell: prefixes are cached anyway.
_TOOL_KEYS: Final = frozenset(
    ("type", "name", "description", "input_schema", "strict", "cache_control")
)
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the answer must look like, and how much to think about it."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessageFields(CommonFields, kw_only=True):
    """The body of a message."""

    messages: list[Any]
    system: Any = None
    stop_sequences: Any = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_message_fields(body: Any) -> tuple[MessageFields, list[str]]:
    """Check the types of a body.

    Returns:
        The typed body, and the names of what has no effect.

    Raises:
        RequestError: a field has the wrong type, or is not supported.
    """
    fields, ignored = parse_fields(body, MessageFields, UNSUPPORTED)
    if fields.stop_sequences is not None:
        if fields.stop is not None:
            raise RequestError("stop and stop_sequences exclude each other.", "stop_sequences")
        fields.stop = fields.stop_sequences
    config = fields.output_config
    if fields.output_format is not None:
        if config is not None and config.format is not None:
            raise RequestError(
                "output_format and output_config.format are two names for one thing: send one.",
                "output_format",
            )
        config = OutputConfig(format=fields.output_format)
    fields.response_format = None if config is None else chat_format(config.format)
    return fields, ignored + unread_keys(fields.tools, _TOOL_KEYS)


def parse_message_sampling(fields: MessageFields, context: RequestContext) -> ParsedSampling:
    """Validate the sampling fields of a body.

    Raises:
        RequestError: a value is out of range, or there is no `max_tokens`.
    """
    if not is_int(fields.max_tokens) or fields.max_tokens < 1:
        raise RequestError(
            f"max_tokens must be an integer of at least 1, got {shown(fields.max_tokens)}.",
            "max_tokens",
        )
    try:
        return parse_sampling(fields, context, ("max_tokens", fields.max_tokens))
    except RequestError as error:
        if error.param == "stop" and fields.stop_sequences is not None:
            words = error.message.replace("stop", "stop_sequences", 1)
            raise RequestError(words, "stop_sequences", error.status, error.code) from error
        raise


def template_variables(fields: MessageFields) -> list[tuple[str, str, Any]]:
    """What the chat template sees of a body besides its messages, as `unread_variables` takes it.

    Later ones take the place of earlier ones.

    Raises:
        RequestError: `thinking` is of a type that is not known.
    """
    variables: list[tuple[str, str, Any]] = []
    if fields.thinking is not None:
        kind = fields.thinking.get("type")
        if not isinstance(kind, str) or kind not in THINKING:
            raise RequestError(
                f"thinking.type must be one of {', '.join(THINKING)}, got {shown(kind)}.",
                "thinking.type",
            )
        variables += [
            ("thinking.type", name, THINKING[kind]) for name in ("enable_thinking", "thinking")
        ]
    if fields.output_config is not None and fields.output_config.effort is not None:
        variables.append(("output_config.effort", "reasoning_effort", fields.output_config.effort))
    given = fields.chat_template_kwargs or {}
    variables += [(f"chat_template_kwargs.{name}", name, value) for name, value in given.items()]
    return variables


def without_effect(fields: MessageFields, server: Server) -> list[str]:
    """What has no effect on this model, of what tells it how to think and of template variables."""
    parsers, thinking = server.parsers, fields.thinking or {}
    has_effect = {"type", "budget_tokens"} if _has_budget(fields, parsers) else {"type"}
    unread = unread_variables(server, template_variables(fields))
    # Without the variable it does what it is told, if it thinks anyway or never does.
    if thinking and THINKING[thinking["type"]] == _thinks(parsers):
        unread = [name for name in unread if name != "thinking.type"]
    return [*unread, *(f"thinking.{name}" for name in thinking if name not in has_effect)]


def _has_budget(fields: MessageFields, parsers: Parsers) -> bool:
    """Whether `thinking.budget_tokens` bounds anything: the model is told to think, and does."""
    is_told = fields.thinking is not None and fields.thinking.get("type") != "disabled"
    return is_told and _thinks(parsers)


def _thinks(parsers: Parsers) -> bool:
    return parsers.reasoning is not None or parsers.is_harmony


def answer_wishes(fields: MessageFields, parsers: Parsers) -> Wishes:
    """What the body asks of the answer, in the shapes of chat completions.

    Raises:
        RequestError: one of them is malformed, or a tool is Anthropic's own.
    """
    tools = fields.tools or []
    if not isinstance(tools, list):
        raise RequestError(f"tools must be a list, got {shown(tools)}.", "tools")
    choice = fields.tool_choice
    parallel = None
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is not None:
        if not isinstance(choice["disable_parallel_tool_use"], bool):
            raise RequestError(
                "tool_choice.disable_parallel_tool_use must be true or false, got "
                f"{shown(choice['disable_parallel_tool_use'])}.",
                "tool_choice.disable_parallel_tool_use",
            )
        parallel = not choice["disable_parallel_tool_use"]
    budget = (fields.thinking or {}).get("budget_tokens")
    return Wishes(
        tools=[_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)],
        tool_choice=_chat_tool_choice(choice),
        parallel_tool_calls=parallel,
        max_thinking_tokens=budget if _has_budget(fields, parsers) else None,
    )


def _chat_tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError(
            f"{name} is of type {shown(kind)}: only tools of your own (custom) can be offered "
            "here.",
            name,
        )
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{name}.name must be a string.", f"{name}.name")
    if not isinstance(tool.get("input_schema"), dict):
        raise RequestError(f"{name}.input_schema must be an object.", f"{name}.input_schema")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for field in ("description", "strict"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Any) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if isinstance(kind, str) and kind in _TOOL_CHOICES:
        return _TOOL_CHOICES[kind]
    raise RequestError(
        'tool_choice must be {"type": "auto"}, "any", "none", or "tool" with a name, '
        f"got {shown(choice)}.",
        "tool_choice",
    )
