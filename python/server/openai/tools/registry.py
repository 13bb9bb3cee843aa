"""The tool-call parsers by name, and which one a chat template calls for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.server.openai.tools.base import CallParser
from trunkline.server.openai.tools.deepseekv3 import DeepSeekV3Parser
from trunkline.server.openai.tools.glm import GlmParser
from trunkline.server.openai.tools.gpt_oss import GptOssParser
from trunkline.server.openai.tools.hermes import HermesParser
from trunkline.server.openai.tools.kimi_k2 import KimiK2Parser
from trunkline.server.openai.tools.llama3 import Llama3Parser
from trunkline.server.openai.tools.mistral import MistralParser
from trunkline.server.openai.tools.pythonic import PythonicParser
from trunkline.server.openai.tools.qwen3_coder import Qwen3CoderParser

PARSERS: Final[Mapping[str, type[CallParser]]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "qwen25": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "lfm2": PythonicParser,
    "deepseekv3": DeepSeekV3Parser,
    "deepseekv31": DeepSeekV3Parser,
    "qwen3_coder": Qwen3CoderParser,
    "glm": GlmParser,
    "glm45": GlmParser,
    "glm47": GlmParser,
    "kimi_k2": KimiK2Parser,
    "gpt-oss": GptOssParser,
}
# The first format all of whose signs a template holds decides.
_SIGNS: Final = (
    (("<|channel|>",), "gpt-oss"),
    (("<｜tool▁calls▁begin｜>",), "deepseekv3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", "<arg_key>"), "glm"),
    (("<tool_call>", "<parameter="), "qwen3_coder"),
    (("<tool_call>", '"arguments": '), "hermes"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<|tool_list_start|>",), "pythonic"),
    (("func_name1(",), "pythonic"),
    (("<|start_header_id|>", '"parameters": '), "llama3"),
)


def detect(template: str) -> str | None:
    """The parser for a model with this chat template; None where no known format is in it."""
    return next((name for signs, name in _SIGNS if all(sign in template for sign in signs)), None)
