"""How models write calls, by parser: each exactly as the public chat template renders history."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = dict[str, Any]
Call = tuple[str, Arguments]

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
        },
    },
    "run": {
        "type": "object",
        "properties": {
            "code": {"type": "string"},
            "options": {"type": "object"},
            "files": {"type": "array"},
            "dry": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(before: str, calls: Sequence[Call], after: str) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    ]
    return "\n".join([before, *blocks] if before else blocks) + after


def llama3(before: str, calls: Sequence[Call], after: str) -> str:
    objects = [
        f'{{"name": "{name}", "parameters": {dumps(arguments)}}}' for name, arguments in calls
    ]
    tag = "<|python_tag|>" if before else ""
    return before + tag + "; ".join(objects) + after


def mistral_list(before: str, calls: Sequence[Call], after: str) -> str:
    objects = [
        f'{{"name": "{name}", "arguments": {dumps(arguments)}, "id": "abc123XYZ"}}'
        for name, arguments in calls
    ]
    return f"{before}[TOOL_CALLS][{', '.join(objects)}]{after}"


def mistral_named(before: str, calls: Sequence[Call], after: str) -> str:
    return (
        before
        + "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)
        + after
    )


def mistral_ids(before: str, calls: Sequence[Call], after: str) -> str:
    return (
        before
        + "".join(
            f"[TOOL_CALLS]{name}[CALL_ID]abc123XYZ[ARGS]{dumps(arguments)}"
            for name, arguments in calls
        )
        + after
    )


def mistral_bare(before: str, calls: Sequence[Call], after: str) -> str:
    blocks = [f"[TOOL_CALLS]{name}{dumps(arguments)}" for name, arguments in calls]
    return before + "".join(blocks) + after


def python_calls(before: str, calls: Sequence[Call], after: str) -> str:
    words = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"{before}[{', '.join(words)}]{after}"


def python_marked(before: str, calls: Sequence[Call], after: str) -> str:
    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    return f"{before}{start}{python_calls('', calls, '')}{end}{after}"


def deepseek_v3(before: str, calls: Sequence[Call], after: str) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"{before}<｜tool▁calls▁begin｜>{chr(10).join(blocks)}<｜tool▁calls▁end｜>{after}"


def deepseek_v31(before: str, calls: Sequence[Call], after: str) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"{before}<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>{after}"


def kimi_k2(before: str, calls: Sequence[Call], after: str) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"
    return before + section + after


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def qwen3_coder(before: str, calls: Sequence[Call], after: str) -> str:
    text = before
    for name, arguments in calls:
        text += f"\n<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            text += f"<parameter={key}>\n{_plain(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text + after


def glm45(before: str, calls: Sequence[Call], after: str) -> str:
    text = before
    for name, arguments in calls:
        text += f"\n<tool_call>{name}"
        for key, value in arguments.items():
            text += f"\n<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>"
        text += "\n</tool_call>"
    return text + after


def glm47(before: str, calls: Sequence[Call], after: str) -> str:
    text = before
    for name, arguments in calls:
        text += f"<tool_call>{name}"
        for key, value in arguments.items():
            text += f"<arg_key>{key}</arg_key><arg_value>{_plain(value)}</arg_value>"
        text += "</tool_call>"
    return text + after


def harmony(before: str, calls: Sequence[Call], after: str) -> str:
    """What follows `<|start|>assistant` in the prompt."""
    messages = [f"<|channel|>commentary<|message|>{before}<|end|>"] if before else []
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    messages += [f"<|channel|>final<|message|>{after.strip()}<|return|>"] if after.strip() else []
    return "<|start|>assistant".join(messages)


def harmony_recipient_first(before: str, calls: Sequence[Call], after: str) -> str:
    messages = [f"<|channel|>commentary<|message|>{before}<|end|>"] if before else []
    messages += [
        f" to=functions.{name}<|channel|>commentary json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    messages += [f"<|channel|>final<|message|>{after.strip()}<|return|>"] if after.strip() else []
    return "<|start|>assistant".join(messages)


@dataclass(frozen=True)
class Format:
    parser: str
    render: Callable[[str, Sequence[Call], str], str]


FORMATS = {
    render.__name__: Format(parser, render)
    for parser, render in (
        ("hermes", hermes),
        ("llama3", llama3),
        ("mistral", mistral_list),
        ("mistral", mistral_named),
        ("mistral", mistral_ids),
        ("mistral", mistral_bare),
        ("pythonic", python_calls),
        ("pythonic", python_marked),
        ("deepseekv3", deepseek_v3),
        ("deepseekv3", deepseek_v31),
        ("kimi_k2", kimi_k2),
        ("qwen3_coder", qwen3_coder),
        ("glm", glm45),
        ("glm", glm47),
        ("gpt-oss", harmony),
        ("gpt-oss", harmony_recipient_first),
    )
}

CODE = 'def f(x):\n    """Say "hi" and \\ back."""\n    return {"a": [x, \'{\'], "b": "]}"}\n'
SCENARIOS: list[tuple[str, list[Call], str]] = [
    ("", [("now", {})], ""),
    ("", [("get_weather", {"city": "Paris"})], ""),
    ("", [("get_weather", {"city": "Paris", "days": 3, "units": "C"})], ""),
    ("", [("get_weather", {"city": "Zürich 北京 👩‍👩‍👧 é"})], ""),
    ("", [("get_weather", {"city": 'a "quoted" \\ city\'s {name}'})], ""),
    ("", [("get_weather", {"city": "line\nbreak\ttab"})], ""),
    ("", [("get_weather", {"city": "12"})], ""),
    ("", [("get_weather", {"city": "true", "days": -1})], ""),
    ("", [("get_weather", {"city": "}]}{[\"'"})], ""),
    ("", [("run", {"code": CODE})], ""),
    ("", [("run", {"code": "x", "options": {"a": {"b": [1, {"c": 'q"}'}]}}})], ""),
    ("", [("run", {"files": [], "options": {}, "dry": True})], ""),
    ("", [("run", {"files": ["a.txt", "b c.txt"], "limit": 1.5e3, "dry": False})], ""),
    ("", [("run", {"limit": None})], ""),
    ("", [("get_weather", {"city": "Rom"}), ("get_weather", {"city": "Wien", "days": 2})], ""),
    ("", [("now", {}), ("run", {"code": "1"}), ("now", {})], ""),
    ("Let me look.", [("get_weather", {"city": "Oslo"})], ""),
    ("Ich sehe nach: „gleich“ …", [("now", {}), ("get_weather", {"city": "Köln"})], ""),
    ("A < b, [c], {d} and `e`.", [("now", {})], ""),
    ("", [("now", {})], "\nThat was it."),
    ("First.", [("get_weather", {"city": "Kyiv"})], "\n\nThen <this> {text}."),
    ("One.", [("run", {"code": "a"}), ("run", {"code": "b"})], " Two."),
]
