"""Structural tags of the calls that an answer must or may hold, in each parser's own format.

A structural tag describes an output piece by piece; the engine makes a grammar of it. Where the
parser's format cannot be described for the tools at hand, the calls are a JSON list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from trunkline.server.openai.tools.base import CallParser
from trunkline.server.openai.tools.choice import ToolChoice
from trunkline.server.openai.tools.deepseekv3 import DeepSeekV3Parser
from trunkline.server.openai.tools.glm import GlmParser
from trunkline.server.openai.tools.gpt_oss import GptOssParser
from trunkline.server.openai.tools.hermes import HermesParser
from trunkline.server.openai.tools.json_list import JsonListParser
from trunkline.server.openai.tools.kimi_k2 import KimiK2Parser
from trunkline.server.openai.tools.llama3 import Llama3Parser
from trunkline.server.openai.tools.mistral import MistralParser
from trunkline.server.openai.tools.qwen3_coder import Qwen3CoderParser
from trunkline.server.openai.tools.xml_parameters import xml_parameters

Format: TypeAlias = dict[str, Any]
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a model at hand writes what its parser reads.

    `special` are texts that are single special tokens, which text cannot spell; `template` is the
    model's chat template, for formats of which there are several.
    """

    special: frozenset[str]
    template: str

    def mark(self, text: str) -> Format:
        """A marker: a token where it is a special one, else its text."""
        return {"type": "token", "token": text} if text in self.special else const(text)


def const(text: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(formats: Sequence[Format]) -> Format:
    """One of these."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def json_of(schema: Mapping[str, Any]) -> Format:
    """An object that follows the schema of a tool's parameters."""
    return {"type": "json_schema", "json_schema": {"type": "object"} | dict(schema)}


def repeated(one: Format, separator: str, *, many: bool) -> Format:
    """Once, or once and more often."""
    if not many:
        return one
    again = sequence(const(separator), one) if separator else one
    return sequence(one, {"type": "star", "content": again})


def required_calls(
    parser: type[CallParser], tools: ToolChoice, dialect: Dialect
) -> tuple[Format, type[CallParser]]:
    """An answer that is calls and nothing else, and the parser that reads it."""
    build = _BUILDERS.get(parser)
    found = build(tools.schemas, tools.parallel, dialect) if build else None
    if found is not None:
        return found, parser
    return _json_list(tools.schemas, tools.parallel, dialect), JsonListParser


def strict_calls(parser: type[CallParser], tools: ToolChoice, dialect: Dialect) -> Format | None:
    """An answer of any text, in which a call must follow its tool's schema if that is strict.

    Returns:
        None where the parser's format has no beginning by which a call can be told from text.
    """
    schemas = {
        name: schema if name in tools.strict else {} for name, schema in tools.schemas.items()
    }
    if parser is Llama3Parser:
        calls = _llama3(schemas, tools.parallel, dialect)
        return either([calls, {"type": "regex", "pattern": r"([^{\s][\s\S]*)?"}])
    if parser is GptOssParser:  # free text has a channel of its own
        return _gpt_oss(schemas, tools.parallel, dialect)
    begin = _TRIGGERS.get(parser)
    if begin is None:
        return None
    calls, reader = required_calls(parser, _replaced(tools, schemas), dialect)
    if reader is not parser:
        return None
    text: Format = {"type": "any_text", "excludes": [] if begin in dialect.special else [begin]}
    return sequence(text, {"type": "optional", "content": sequence(calls, text)})


def _replaced(tools: ToolChoice, schemas: Schemas) -> ToolChoice:
    return ToolChoice(
        tools=tools.tools,
        schemas=schemas,
        strict=tools.strict,
        must_call=tools.must_call,
        parallel=tools.parallel,
    )


def _json_calls(schemas: Schemas, key: str) -> Format:
    return either(
        [
            sequence(const(f'{{"name": "{name}", "{key}": '), json_of(schema), const("}"))
            for name, schema in schemas.items()
        ]
    )


def _json_list(schemas: Schemas, parallel: bool, _: Dialect) -> Format:
    calls = repeated(_json_calls(schemas, "parameters"), ", ", many=parallel)
    return sequence(const("["), calls, const("]"))


def _hermes(schemas: Schemas, parallel: bool, dialect: Dialect) -> Format:
    one = sequence(
        dialect.mark("<tool_call>"),
        const("\n"),
        _json_calls(schemas, "arguments"),
        const("\n"),
        dialect.mark("</tool_call>"),
    )
    return repeated(one, "\n", many=parallel)


def _llama3(schemas: Schemas, _: bool, __: Dialect) -> Format:
    """One call: the models' templates refuse chats with several at once."""
    return _json_calls(schemas, "parameters")


def _mistral(schemas: Schemas, parallel: bool, dialect: Dialect) -> Format:
    begin = dialect.mark("[TOOL_CALLS]")
    if "[ARGS]" not in dialect.template:
        calls = repeated(_json_calls(schemas, "arguments"), ", ", many=parallel)
        return sequence(begin, const("["), calls, const("]"))
    calls = either(
        [
            sequence(begin, const(name), dialect.mark("[ARGS]"), json_of(schema))
            for name, schema in schemas.items()
        ]
    )
    return repeated(calls, "", many=parallel)


def _deepseekv3(schemas: Schemas, parallel: bool, dialect: Dialect) -> Format:
    begin, end = dialect.mark("<｜tool▁call▁begin｜>"), dialect.mark("<｜tool▁call▁end｜>")
    separator = dialect.mark("<｜tool▁sep｜>")
    is_fenced = "```json" in dialect.template
    calls = []
    for name, schema in schemas.items():
        if is_fenced:
            head = [begin, const("function"), separator, const(f"{name}\n```json\n")]
            calls.append(sequence(*head, json_of(schema), const("\n```"), end))
        else:
            calls.append(sequence(begin, const(name), separator, json_of(schema), end))
    return sequence(
        dialect.mark("<｜tool▁calls▁begin｜>"),
        repeated(either(calls), "\n" if is_fenced else "", many=parallel),
        dialect.mark("<｜tool▁calls▁end｜>"),
    )


def _kimi_k2(schemas: Schemas, parallel: bool, dialect: Dialect) -> Format:
    calls = either(
        [
            sequence(
                dialect.mark("<|tool_call_begin|>"),
                {"type": "regex", "pattern": f"functions\\.{_quoted(name)}:[0-9]{{1,3}}"},
                dialect.mark("<|tool_call_argument_begin|>"),
                json_of(schema),
                dialect.mark("<|tool_call_end|>"),
            )
            for name, schema in schemas.items()
        ]
    )
    return sequence(
        dialect.mark("<|tool_calls_section_begin|>"),
        repeated(calls, "", many=parallel),
        dialect.mark("<|tool_calls_section_end|>"),
    )


def _quoted(name: str) -> str:
    return name.replace(".", "\\.").replace("/", "\\/").replace("-", "\\-")


def _gpt_oss(schemas: Schemas, _: bool, dialect: Dialect) -> Format:
    """One call: the token after it ends the answer."""
    return either(
        [
            sequence(
                dialect.mark("<|channel|>"),
                const(f"commentary to=functions.{name} "),
                dialect.mark("<|constrain|>"),
                const("json"),
                dialect.mark("<|message|>"),
                json_of(schema),
            )
            for name, schema in schemas.items()
        ]
    )


def _qwen3_coder(schemas: Schemas, parallel: bool, dialect: Dialect) -> Format | None:
    calls = []
    for name, schema in schemas.items():
        parameters = xml_parameters(
            schema, lambda key: [const(f"<parameter={key}>\n")], [const("\n</parameter>\n")]
        )
        if parameters is None:
            return None
        calls.append(sequence(const(f"<function={name}>\n"), *parameters, const("</function>")))
    begin, end = dialect.mark("<tool_call>"), dialect.mark("</tool_call>")
    return repeated(
        sequence(begin, const("\n"), either(calls), const("\n"), end), "\n", many=parallel
    )


def _glm(schemas: Schemas, parallel: bool, dialect: Dialect) -> Format | None:
    gap = "\n" if "</arg_key>\n" in dialect.template else ""
    mark = dialect.mark

    def opening(key: str) -> list[Format]:
        value = [const(gap), mark("<arg_value>")] if gap else [mark("<arg_value>")]
        return [mark("<arg_key>"), const(key), mark("</arg_key>"), *value]

    closing = [mark("</arg_value>"), const(gap)] if gap else [mark("</arg_value>")]
    calls = []
    for name, schema in schemas.items():
        parameters = xml_parameters(schema, opening, closing)
        if parameters is None:
            return None
        calls.append(sequence(const(name + gap), *parameters))
    begin, end = mark("<tool_call>"), mark("</tool_call>")
    return repeated(sequence(begin, either(calls), end), gap, many=parallel)


_BUILDERS: Final[Mapping[type[CallParser], Callable[[Schemas, bool, Dialect], Format | None]]] = {
    HermesParser: _hermes,
    Llama3Parser: _llama3,
    MistralParser: _mistral,
    DeepSeekV3Parser: _deepseekv3,
    KimiK2Parser: _kimi_k2,
    GptOssParser: _gpt_oss,
    Qwen3CoderParser: _qwen3_coder,
    GlmParser: _glm,
}
# What a call in these formats begins with.
_TRIGGERS: Final[Mapping[type[CallParser], str]] = {
    HermesParser: "<tool_call>",
    MistralParser: "[TOOL_CALLS]",
    DeepSeekV3Parser: "<｜tool▁calls▁begin｜>",
    KimiK2Parser: "<|tool_calls_section_begin|>",
    Qwen3CoderParser: "<tool_call>",
    GlmParser: "<tool_call>",
}
