"""Structural tags around an answer: what may be thought before it, and how much."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias

from trunkline.engine.messages import GrammarSpec
from trunkline.server.openai.reasoning.think import Tags
from trunkline.server.openai.tools.constraint import Dialect, Format, const, either, sequence

# Whether an answer begins inside reasoning, may begin with some, or has none.
Thinking: TypeAlias = Literal["open", "possible", "none"]
_SPACE: Format = {"type": "regex", "pattern": "\\n{0,2}"}
_ANY: Format = {"type": "any_text"}


def format_of(spec: GrammarSpec) -> Format:
    """A grammar as a part of a structural tag.

    Raises:
        ValueError: it is meant to be JSON and is not.
    """
    match spec.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(spec.text)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": spec.text}
        case "ebnf":
            return {"type": "grammar", "grammar": spec.text}
    document: Any = json.loads(spec.text)
    if isinstance(document, dict) and isinstance(document.get("format"), dict):
        found: Format = document["format"]
        return found
    raise ValueError("it needs a format; the older form goes with neither tools nor reasoning")


def structural_tag(found: Format) -> GrammarSpec:
    """The grammar of an output."""
    text = json.dumps({"type": "structural_tag", "format": found}, ensure_ascii=False)
    return GrammarSpec(kind="structural_tag", text=text)


def after_thoughts(
    dialect: Dialect, tags: Tags, thinking: Thinking, answer: Format | None, limit: int | None
) -> Format | None:
    """What an output may be, reasoning included.

    Args:
        dialect: how the model writes.
        tags: how reasoning is marked.
        thinking: what the output begins with.
        answer: what the answer must be; None: anything.
        limit: how many tokens the reasoning may have; None: any number.

    Returns:
        None where there is nothing to hold it to.
    """
    if thinking == "none" or (answer is None and limit is None):
        return answer
    thoughts = _without(tags.end, dialect)
    if limit is not None:
        thoughts["max_tokens"] = limit
    rest = _ANY if answer is None else sequence(_SPACE, answer)
    whole = sequence(thoughts, dialect.mark(tags.end), rest)
    if thinking == "open":
        return whole
    without = _without(tags.begin, dialect) if answer is None else answer
    return either([sequence(_SPACE, dialect.mark(tags.begin), whole), without])


def _without(mark: str, dialect: Dialect) -> Format:
    """Any text without a mark; text never spells a special token."""
    return {"type": "any_text", "excludes": [] if mark in dialect.special else [mark]}


def after_analysis(
    dialect: Dialect,
    calls: Format | None,
    answer: Format | None,
    limit: int | None,
    *,
    must_call: bool,
) -> Format | None:
    """The same for gpt-oss, whose output goes on where the prompt has `<|start|>assistant`.

    Args:
        dialect: how the model writes.
        calls: what may stand instead of a message on the final channel, or must with `must_call`.
        answer: what a message on the final channel must be; None: anything.
        limit: how many tokens the reasoning may have.
        must_call: there must be a call.
    """
    if answer is None and calls is None and limit is None:
        return None
    mark = dialect.mark
    thoughts: Format = {"type": "any_text"}
    if limit is not None:
        thoughts["max_tokens"] = limit
    analysis = sequence(
        mark("<|channel|>"),
        const("analysis"),
        mark("<|message|>"),
        thoughts,
        mark("<|end|>"),
        mark("<|start|>"),
        const("assistant"),
    )
    ends = [] if calls is None else [calls]
    if not must_call:
        final = [mark("<|channel|>"), const("final"), mark("<|message|>")]
        ends.append(sequence(*final, _ANY if answer is None else answer))
    return sequence({"type": "optional", "content": analysis}, either(ends))
