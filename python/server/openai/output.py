"""What a chat's answer is made of, and how it is read: the same for every API with chats.

    parsers = Parsers.of(...)                      # once per server
    plan = plan_output(parsers, wishes, limits)    # from a body, in the shapes of chat completions
    chat = plan.chat(messages)                     # what the chat template is given
    output = plan.for_prompt(prompt, sampling)     # what is sampled, under which grammar
    splitter = output.splitter()                   # one per sample

Knows nothing of HTTP and of how an API writes the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from trunkline.engine.messages import GrammarSpec
from trunkline.engine.validation import Limits, ParsedSampling, RequestError, is_int, shown
from trunkline.server.openai.parsers import Parsers
from trunkline.server.openai.reasoning.constraint import (
    Thinking,
    after_analysis,
    after_thoughts,
    format_of,
    structural_tag,
)
from trunkline.server.openai.reasoning.think import ThinkSplitter
from trunkline.server.openai.special_text import Strip, Stripped
from trunkline.server.openai.splitting import OutputSplitter
from trunkline.server.openai.tools.base import CallParser, Calls
from trunkline.server.openai.tools.choice import ToolChoice, parse_tool_choice
from trunkline.server.openai.tools.constraint import Format, either, required_calls, strict_calls
from trunkline.server.openai.tools.history import as_text, check_calls, with_hint, with_ids

Message = Mapping[str, Any]
_HARMONY_ENDS: Final = ("<|channel|>final", "<|channel|>commentary", " to=functions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a body asks of the answer, in the shapes of chat completions; None: not said."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    max_thinking_tokens: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What the chat template is given."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]


def plan_output(parsers: Parsers, wishes: Wishes, limits: Limits) -> OutputPlan:
    """Check what a body asks of the answer.

    Raises:
        RequestError: it is malformed, or this model cannot do it.
    """
    tools = parse_tool_choice(wishes.tools, wishes.tool_choice, wishes.parallel_tool_calls)
    limit = wishes.max_thinking_tokens
    if limit is not None:
        if not is_int(limit) or not 0 <= limit < 1 << 31:
            raise RequestError(
                f"max_thinking_tokens must be an integer in [0, 2**31), got {shown(limit)}.",
                "max_thinking_tokens",
            )
        if parsers.reasoning is None and not parsers.is_harmony:
            raise RequestError(
                "max_thinking_tokens needs a model that reasons: start the server with "
                "--reasoning-parser.",
                "max_thinking_tokens",
            )
    if tools is not None and parsers.tools is None and (tools.must_call or tools.strict):
        raise RequestError(
            "calls cannot be required: it is not known how this model writes them; start the "
            "server with --tool-call-parser.",
            "tool_choice" if tools.must_call else "tools",
        )
    return OutputPlan(
        parsers=parsers,
        tools=tools,
        separate_reasoning=wishes.separate_reasoning is not False,
        stream_reasoning=wishes.stream_reasoning is not False,
        max_thinking_tokens=limit,
        max_grammar_chars=limits.max_grammar_chars,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """What a body asks of the answer, checked."""

    parsers: Parsers
    tools: ToolChoice | None
    separate_reasoning: bool
    stream_reasoning: bool
    max_thinking_tokens: int | None
    max_grammar_chars: int

    def chat(self, messages: Sequence[Message]) -> Chat:
        """The chat as this model's template takes it.

        Raises:
            RequestError: a call in it is malformed, or the tools cannot be told to the model.
        """
        check_calls(messages)
        parsers = self.parsers
        if parsers.call_ids is not None:
            messages = with_ids(messages, parsers.call_ids)
        if not parsers.template_takes_calls:
            messages = as_text(messages)
        if self.tools is None:
            return Chat(messages=messages, tools=())
        if parsers.template_takes_tools:
            return Chat(messages=messages, tools=self.tools.tools)
        if parsers.example is None:
            raise RequestError(
                "the model's chat template does not take tools: start the server with a "
                "--tool-call-parser, so that they can be described to it.",
                "tools",
            )
        role = "system" if parsers.template_takes_system else "user"
        hinted = with_hint(messages, self.tools.tools, parsers.example, role)
        return Chat(messages=hinted, tools=())

    def for_prompt(
        self, prompt: str, sampling: ParsedSampling, continued: str | None = None
    ) -> Output:
        """How the answer to a prompt is sampled and read.

        Args:
            prompt: the rendered chat.
            sampling: the body's own parameters and grammar.
            continued: the end of the prompt that is the beginning of the answer; None: there is
                no such beginning.

        Raises:
            RequestError: what is asked for contradicts itself.
        """
        tags = self.parsers.reasoning
        thinking: Thinking = "none"
        if tags is not None:
            if continued is not None:
                thinking = "open" if tags.within(continued) else "none"
            elif tags.left_open(prompt):
                thinking = "open"
            elif not prompt.rstrip().endswith(tags.end):
                thinking = "possible"
        found, parser = self._constraint(sampling.grammar, thinking)
        grammar = sampling.grammar if found is None else structural_tag(found)
        if grammar is not None and len(grammar.text) > self.max_grammar_chars:
            raise RequestError(
                f"the grammar of tools, format and reasoning may have {self.max_grammar_chars} "
                f"characters, it has {len(grammar.text)}: send fewer or smaller schemas.",
                "tools" if self.tools is not None else "response_format",
            )
        stripped = self._stripped(parser, sampling)
        params = sampling.sampling
        if stripped is not None:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return Output(
            plan=self,
            sampling=replace(sampling, sampling=params, grammar=grammar),
            parser=parser,
            thinking=thinking,
            stripped=stripped,
        )

    def _constraint(
        self, spec: GrammarSpec | None, thinking: Thinking
    ) -> tuple[Format | None, type[CallParser] | None]:
        """What the output must be where tools or reasoning say so, and what reads the calls."""
        parsers, tools, limit = self.parsers, self.tools, self.max_thinking_tokens
        parser = parsers.tools if tools is not None or parsers.is_harmony else None
        calls: Format | None = None
        if tools is not None and parser is not None:
            if tools.must_call:
                if spec is not None:
                    raise RequestError(
                        "tool_choice requires a call: it excludes a format and other constraints.",
                        "tool_choice",
                    )
                calls, parser = required_calls(parser, tools, parsers.dialect)
            elif spec is not None:
                calls, reader = required_calls(parser, tools, parsers.dialect)
                calls = calls if reader is parser else None
            elif tools.strict:
                calls = strict_calls(parser, tools, parsers.dialect)
                if calls is None:
                    raise RequestError(
                        "strict tools need tool_choice required or a named one with this model: "
                        "the beginning of its calls cannot be told from text.",
                        "tools",
                    )
        is_alone = calls is None and not parsers.is_harmony
        if is_alone and (parsers.reasoning is None or thinking == "none"):
            return None, parser
        answer = None if spec is None else self._format(spec)
        if parsers.is_harmony:
            return after_analysis(
                parsers.dialect,
                calls,
                answer,
                limit,
                must_call=tools is not None and tools.must_call,
            ), parser
        both = [one for one in (calls, answer) if one is not None]
        found = either(both) if both else None
        if parsers.reasoning is not None:
            found = after_thoughts(parsers.dialect, parsers.reasoning, thinking, found, limit)
        return (None if found is answer else found), parser

    def _format(self, spec: GrammarSpec) -> Format:
        try:
            return format_of(spec)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"Failed to compile {spec.kind} grammar: {error}.") from error

    def _stripped(
        self, parser: type[CallParser] | None, sampling: ParsedSampling
    ) -> Stripped | None:
        """What to remove from the text, where marks are special tokens and must be seen."""
        marks = list(parser.markers) if parser is not None else []
        if self.parsers.reasoning is not None:
            marks += [self.parsers.reasoning.begin, self.parsers.reasoning.end]
        if not sampling.sampling.skip_special_tokens:
            return None
        if self.parsers.special.texts.isdisjoint(marks):
            return None
        return self.parsers.special.without(marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How one request is sampled, and how each of its samples is read."""

    plan: OutputPlan
    sampling: ParsedSampling
    parser: type[CallParser] | None
    thinking: Thinking
    stripped: Stripped | None

    def splitter(self) -> OutputSplitter:
        """A splitter for one sample."""
        plan, parser = self.plan, self.parser
        tags = plan.parsers.reasoning
        interrupts = parser.interrupts_reasoning if parser is not None else ()
        think = None
        if tags is not None and self.thinking != "none":
            think = ThinkSplitter(
                tags,
                is_open=self.thinking == "open",
                verbatim=not plan.separate_reasoning,
                interrupts=interrupts,
            )
        ends = _HARMONY_ENDS if tags is None else (tags.end, *interrupts)
        has_reasoning = think is not None or plan.parsers.is_harmony
        return OutputSplitter(
            None if self.stripped is None else Strip(self.stripped),
            think,
            None if parser is None else parser(_calls(plan.tools)),
            meter=plan.parsers.meter(ends) if has_reasoning else None,
            separate=plan.separate_reasoning,
            hold_reasoning=not plan.stream_reasoning,
        )


def _calls(tools: ToolChoice | None) -> Calls:
    if tools is None:
        return Calls(schemas={})
    return Calls(schemas=tools.schemas, parallel=tools.parallel)
