"""How the model at hand writes calls and reasoning: by name, or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from trunkline.engine.validation import RequestError
from trunkline.server.openai.reasoning import registry as reasoning_registry
from trunkline.server.openai.reasoning.meter import ReasoningMeter
from trunkline.server.openai.reasoning.think import Tags
from trunkline.server.openai.special_text import SpecialTexts
from trunkline.server.openai.tools import registry as tool_registry
from trunkline.server.openai.tools.base import CallParser
from trunkline.server.openai.tools.constraint import Dialect
from trunkline.server.openai.tools.gpt_oss import GptOssParser
from trunkline.server.openai.tools.history import NewId, numbered_id, short_id
from trunkline.server.openai.tools.kimi_k2 import KimiK2Parser
from trunkline.server.openai.tools.mistral import MistralParser
from trunkline.server.token_text import Tokenizer

AUTO: Final = "auto"
NONE: Final = "none"
TOOL_PARSER_NAMES: Final = (AUTO, NONE, *tool_registry.PARSERS)
REASONING_PARSER_NAMES: Final = (AUTO, NONE, *reasoning_registry.PARSERS)


class Template(Protocol):
    """What is asked of a chat template."""

    @property
    def text(self) -> str:
        """Its own text; empty without a template."""

    @property
    def takes_tools(self) -> bool:
        """Whether it tells the model of tools."""

    @property
    def takes_system(self) -> bool:
        """Whether a chat may begin with a system message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """How a model writes, and what its chat template does itself.

    `tools` and `reasoning` are None where calls and reasoning are not told from content; with
    `is_harmony` the parser of calls takes reasoning apart too. `call_ids` gives ids of calls in a
    chat the form that the model knows. `example` shows a call to a model whose template does not
    take tools. `special` are the model's special tokens.
    """

    tool_name: str
    reasoning_name: str
    tools: type[CallParser] | None
    reasoning: Tags | None
    is_harmony: bool
    template_takes_tools: bool
    template_takes_calls: bool
    template_takes_system: bool
    call_ids: NewId | None
    example: str | None
    dialect: Dialect
    special: SpecialTexts
    tokenizer: Tokenizer

    @classmethod
    def of(
        cls,
        tool_name: str,
        reasoning_name: str,
        template: Template,
        tokenizer: Tokenizer,
    ) -> Parsers:
        """The parsers of a model.

        Args:
            tool_name: a name, `auto` or `none`.
            reasoning_name: a name, `auto` or `none`.
            template: the model's.
            tokenizer: the model's.

        Raises:
            RequestError: one parser reads calls and reasoning both, and another one was given.
        """
        given = {"--tool-call-parser": tool_name, "--reasoning-parser": reasoning_name}
        if tool_name == AUTO:
            found = tool_registry.detect(template.text)
            # A template that does not know of tools is given them as text, in Hermes's format.
            tool_name = found or (NONE if template.takes_tools or not template.text else "hermes")
        if reasoning_name == AUTO:
            reasoning_name = reasoning_registry.detect(template.text) or NONE
        is_harmony = reasoning_registry.HARMONY in (tool_name, reasoning_name)
        if is_harmony:
            _refuse_others(given)
        parser = GptOssParser if is_harmony else tool_registry.PARSERS.get(tool_name)
        specials = SpecialTexts(tokenizer.token_of(one) or "" for one in tokenizer.special_ids)
        return cls(
            tool_name=tool_name,
            reasoning_name=reasoning_name,
            tools=parser,
            reasoning=None if is_harmony else reasoning_registry.PARSERS.get(reasoning_name),
            is_harmony=is_harmony,
            template_takes_tools=template.takes_tools,
            template_takes_calls="tool_calls" in template.text,
            template_takes_system=template.takes_system,
            call_ids={MistralParser: short_id, KimiK2Parser: numbered_id}.get(parser)
            if parser is not None
            else None,
            example=None if parser is None else parser.example,
            dialect=Dialect(special=specials.texts, template=template.text),
            special=specials,
            tokenizer=tokenizer,
        )

    def meter(self, end_marks: Sequence[str]) -> ReasoningMeter:
        """What counts one sample's reasoning tokens, which end with the first of these marks."""
        encoded = self.tokenizer.encode_batch(list(end_marks), add_special_tokens=False)
        ids = frozenset(one[0] for one in encoded if len(one) == 1)
        return ReasoningMeter(end_marks, ids, self.tokenizer.decode)


def _refuse_others(given: Mapping[str, str]) -> None:
    harmony = reasoning_registry.HARMONY
    for flag, name in given.items():
        if name not in (AUTO, harmony):
            raise RequestError(
                f"{flag} is {name}, but this model writes calls and reasoning as {harmony} reads "
                f"them both: leave {flag} out, or set it to {harmony}"
            )
