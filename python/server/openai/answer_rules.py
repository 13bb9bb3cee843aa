"""What an answer may and must be besides text: tools to call, a format to have.

The one place where `/v1/responses` and `/v1/messages` learn of tools and formats, and of how a
sample's text is cut into pieces. Both convert what their clients send to the shapes of chat
completions before they ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trunkline.engine.validation import RequestError, shown
from trunkline.server.openai.pieces import PlainSplitter, Splitter

MakeSplitter: TypeAlias = Callable[[], Splitter]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWishes:
    """What a body asks of the answer, in the shapes of chat completions.

    `format_name` is the client's name of `response_format`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    format_name: str = "response_format"


def splitter_factory(wishes: AnswerWishes) -> MakeSplitter:
    """What makes the splitter for a sample of an answer with these wishes.

    Raises:
        RequestError: this server cannot fulfil them.
    """
    if wishes.tools:
        raise RequestError("tools are not supported by this server: leave them out.", "tools")
    if wishes.tool_choice not in (None, "auto", "none"):
        raise RequestError(
            "tool_choice needs tools, which this server does not have.", "tool_choice"
        )
    name = wishes.format_name
    kind = (wishes.response_format or {}).get("type", "text")
    if kind != "text":
        raise RequestError(
            f"{name} of type {shown(kind)} is not supported by this server: it may only be "
            '{"type": "text"}.',
            name,
        )
    return PlainSplitter
