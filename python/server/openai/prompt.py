"""A chat -> the prompt that a model is asked to go on with; the same for every API with chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trunkline.engine.chat_template import RESERVED_VARIABLES
from trunkline.engine.prompts import check_length, check_prompt
from trunkline.engine.validation import RequestError
from trunkline.server.openai.messages import check_messages, last_text
from trunkline.server.openai.output import OutputPlan
from trunkline.server.state import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat in the shapes of chat completions, and what else the chat template is given.

    With `continues` the answer goes on inside the last message; else `generates` says whether the
    prompt ends with the opening of the assistant's message.
    """

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    generates: bool = True
    continues: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as text and as tokens; `continued` is its end that is the answer's beginning."""

    text: str
    ids: list[int]
    continued: str | None = None


def unread_variables(server: Server, given: Sequence[tuple[str, str, Any]]) -> list[str]:
    """What of a body changes nothing in the prompt: the template does not read it, or it lost.

    Args:
        server: whose template it is.
        given: for each template variable its name in the body, its own and its value; later ones
            take the place of earlier ones. A name that sets several counts if one of them does.
    """
    reads, last = server.chat_template.reads, {name: value for _, name, value in given}
    read = {path for path, name, value in given if reads(name) and value == last[name]}
    return list(dict.fromkeys(path for path, _, _ in given if path not in read))


def chat_prompt(server: Server, plan: OutputPlan, chat: Conversation) -> Prompt:
    """The prompt of a chat whose answer is made by `plan`.

    Raises:
        RequestError: a message is malformed, the template refuses the chat, or it is too long.
    """
    limits = server.openai.limits
    text = render_chat(server, plan, chat)
    check_length(text, "messages", server.tokenizer, limits)
    [ids] = server.tokenizer.encode_batch([text], add_special_tokens=False)
    check_prompt(ids, "messages", limits)
    return Prompt(
        text=text, ids=ids, continued=last_text(chat.messages) if chat.continues else None
    )


def count_chat(server: Server, plan: OutputPlan, chat: Conversation) -> int:
    """The number of tokens of a chat's prompt, however long.

    Raises:
        RequestError: a message is malformed, or the template refuses the chat.
    """
    return len(server.tokenizer.encode_batch([render_chat(server, plan, chat)], False)[0])


def render_chat(server: Server, plan: OutputPlan, chat: Conversation) -> str:
    """The text of a chat's prompt, to be encoded without special tokens.

    Raises:
        RequestError: a message is malformed, or the template refuses the chat (its own words).
    """
    check_messages(chat.messages)
    reserved = RESERVED_VARIABLES & chat.variables.keys()
    if reserved:
        raise RequestError(
            f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}.",
            "chat_template_kwargs",
        )
    told = plan.chat(chat.messages)
    try:
        return server.chat_template.render(
            told.messages,
            tools=told.tools,
            add_generation_prompt=chat.generates,
            continue_final_message=chat.continues,
            documents=chat.documents,
            **chat.variables,
        )
    except ValueError as error:
        raise RequestError(str(error), "messages") from error
