"""Chat messages to the text of a prompt, through the model's Jinja template.

Messages are brought into the form that the template at hand expects. This module knows nothing of
tokenizers (the rendered text already holds its BOS) and nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.meta
from jinja2 import nodes

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.template_sandbox import sandboxed_environment
from trunkline.engine.validation import shown

Message = Mapping[str, Any]

MAX_OUTPUT_CHARACTERS = 64 << 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING = ("reasoning_content", "thinking", "reasoning")
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
# Ends in a space: whether the space survives tells whether the template trims contents.
_CONTINUE_HERE = "\ue000continue-here\ue000 "


class ChatTemplateError(ValueError):
    """A chat that cannot be rendered: the client's fault, or what the template says it is."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Templates by name ("default", "tool_use", ...) and where they come from."""

    templates: Mapping[str, str]
    origin: str

    @classmethod
    def from_file(cls, path: Path) -> TemplateSource:
        """The text of a file, or of `chat_template` in a .json file, as the default template.

        Raises:
            CheckpointError: the file is missing, not UTF-8 text, or JSON without a template.
        """
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read the chat template {path}: {error}") from error
        if path.suffix == ".json":
            text = _from_json(text, path)
        return cls({"default": text}, str(path))


def _from_json(text: str, path: Path) -> str:
    try:
        template = json.loads(text)["chat_template"]
    except (ValueError, TypeError, KeyError):
        template = None
    if not isinstance(template, str):
        raise CheckpointError(
            f"{path} has no chat template: a .json file needs the key 'chat_template' with Jinja "
            "text; give a .jinja file otherwise"
        )
    return template


class ChatTemplate:
    """A model's chat templates, compiled once; safe to share between threads."""

    def __init__(
        self,
        source: TemplateSource | None,
        named_tokens: Mapping[str, str],
        max_output_characters: int = MAX_OUTPUT_CHARACTERS,
    ) -> None:
        """Compile the templates.

        Args:
            source: the templates; None for a model without.
            named_tokens: what templates see as `bos_token`, `eos_token`, ...
            max_output_characters: a longer rendered chat is refused.

        Raises:
            CheckpointError: a template has a syntax error; the message names origin and line.
        """
        environment = sandboxed_environment()
        templates = source.templates if source else {}
        self._templates = {
            name: _Compiled(environment, text, f"{source.origin if source else ''}, {name}")
            for name, text in templates.items()
        }
        self._named_tokens = dict(named_tokens)
        self._max_output_characters = max_output_characters

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template at all."""
        return bool(self._templates)

    @property
    def text(self) -> str:
        """The templates' own text; empty for a model without."""
        return "\n".join(template.text for template in self._templates.values())

    @property
    def takes_tools(self) -> bool:
        """Whether a template tells the model of `tools`."""
        return self.reads("tools")

    @cached_property
    def takes_system(self) -> bool:
        """Whether a chat may begin with a system message."""
        try:
            self.render([{"role": role, "content": "Hello"} for role in ("system", "user")])
        except ChatTemplateError:
            return False
        return True

    @property
    def content_style(self) -> Literal["text", "parts"]:
        """Whether the default template takes contents as text or loops over their parts."""
        return self._select(has_tools=False).content_style

    def reads(self, variable: str) -> bool:
        """Whether a template looks at `variable`, so that passing it can have an effect."""
        return any(variable in template.variables for template in self._templates.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a chat. Encode it without special tokens: it brings its own.

        Messages are plain JSON values and are not changed. On the way to the template a missing or
        null content becomes ""; a list of text parts is kept if the template loops over parts, else
        joined by spaces; the role `developer` becomes `system` unless the template knows it; the
        arguments of tool calls become objects; reasoning is given under all its usual names.

        Args:
            messages: the chat, at least one message.
            tools: tool descriptions; selects the template named `tool_use` where there is one.
            documents: documents for retrieval templates.
            add_generation_prompt: end with the opening of an assistant message.
            continue_final_message: end inside the last message, so that its text is continued.
            variables: further template variables (`chat_template_kwargs`).

        Raises:
            ChatTemplateError: no template, a message that is not understood, an error that the
                template raises (its own words), or an output that is too long.
        """
        template = self._select(has_tools=bool(tools))
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other"
            )
        if taken := (RESERVED_VARIABLES | self._named_tokens.keys()) & variables.keys():
            raise ChatTemplateError(
                f"chat template variables {', '.join(sorted(taken))} are set by the engine"
            )
        if not messages:
            raise ChatTemplateError("messages is empty")
        chat = [template.prepare(index, message) for index, message in enumerate(messages)]
        if continue_final_message:
            chat[-1] = _mark_end(chat[-1])
        context = self._named_tokens | variables
        context |= {"messages": chat, "tools": tools or None, "documents": documents or None}
        context["add_generation_prompt"] = add_generation_prompt
        text = template.render(context, self._max_output_characters)
        return _cut_at_mark(text) if continue_final_message else text

    def _select(self, *, has_tools: bool) -> _Compiled:
        if not self._templates:
            raise ChatTemplateError(
                "this model has no chat template: start the server with --chat-template FILE, or "
                "use /v1/completions or /generate with a prompt"
            )
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise ChatTemplateError(
            f"this model has no chat template named 'default', only "
            f"{', '.join(sorted(self._templates))}: choose one with --chat-template FILE"
        )


class _Compiled:
    """One template, and what its source says about the messages that it expects."""

    def __init__(self, environment: jinja2.Environment, text: str, origin: str) -> None:
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"chat template of {origin}: line {error.lineno}: {error.message}"
            ) from error
        self._strings = {
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        }
        self.text = text
        self.variables = jinja2.meta.find_undeclared_variables(tree)
        self.content_style = _content_style(tree)
        self._accepts_strings = self.content_style == "text" or any(
            test.name == "string" for test in tree.find_all(nodes.Test)
        )

    def prepare(self, index: int, message: Message) -> dict[str, Any]:
        """The message as the template expects it, in dicts of its own."""
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"messages[{index}] is not an object")
        prepared = dict(message)
        prepared["role"] = self._role(index, message.get("role"))
        prepared["content"] = self._content(index, message.get("content"))
        if message.get("tool_calls"):
            prepared["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
        else:
            prepared.pop("tool_calls", None)
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        if reasoning is not None:
            prepared = dict.fromkeys(_REASONING, reasoning) | prepared
            prepared["reasoning_content"] = reasoning
        return prepared

    def render(self, context: Mapping[str, Any], max_characters: int) -> str:
        chunks, length = [], 0
        try:
            for chunk in self._template.generate(context):
                chunks.append(chunk)
                length += len(chunk)
                if length > max_characters:
                    break
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or "the chat template failed") from error
        except Exception as error:  # whatever Python raises on the template's behalf
            raise ChatTemplateError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from error
        if length > max_characters:
            raise ChatTemplateError(
                f"the rendered chat is longer than {max_characters} characters; shorten it"
            )
        return "".join(chunks)

    def _role(self, index: int, role: object) -> str:
        if not isinstance(role, str) or (role not in ROLES and role not in self._strings):
            raise ChatTemplateError(
                f"messages[{index}].role is {shown(role)}; known are {', '.join(ROLES)}"
            )
        return "system" if role == "developer" and role not in self._strings else role

    def _content(self, index: int, content: object) -> str | list[dict[str, str]]:
        if content is None:
            content = ""
        if isinstance(content, str):
            return content if self._accepts_strings else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise ChatTemplateError(
                f"messages[{index}].content must be a string or a list of parts"
            )
        texts = [_part_text(index, number, part) for number, part in enumerate(content)]
        if self.content_style == "parts":
            return [{"type": "text", "text": text} for text in texts]
        return " ".join(texts)


def _part_text(index: int, number: int, part: object) -> str:
    where = f"messages[{index}].content[{number}]"
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        raise ChatTemplateError(f"{where} has type {shown(kind)}; this model takes only 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatTemplateError(f"{where}.text must be a string")
    return text


def _with_arguments(call: object) -> object:
    """A tool call whose arguments, JSON text in OpenAI's API, are the object that templates expect.

    Text that is no JSON object stays as it is: a model may have written it, and said so before.
    """
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _mark_end(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + _CONTINUE_HERE}
    if not content:
        raise ChatTemplateError("continue_final_message: the last message has no text")
    last = content[-1] | {"text": content[-1]["text"] + _CONTINUE_HERE}
    return message | {"content": [*content[:-1], last]}


def _cut_at_mark(text: str) -> str:
    mark = _CONTINUE_HERE.rstrip()
    position = text.rfind(mark)
    if position < 0:
        raise ChatTemplateError(
            "continue_final_message: the chat template leaves the end of the last message out"
        )
    kept = text[:position]
    return kept if text.startswith(_CONTINUE_HERE, position) else kept.rstrip()


def _content_style(tree: nodes.Template) -> Literal["text", "parts"]:
    """Whether the template loops over the parts of a message's content."""
    sources = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset())
    }
    loops = tree.find_all(nodes.For)
    return "parts" if any(_is_content(loop.iter, sources) for loop in loops) else "text"


def _is_content(node: nodes.Node | None, names: set[str] | frozenset[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
