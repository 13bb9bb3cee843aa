"""The prompt of a response, which may be too long: `truncation` of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trunkline.engine.validation import RequestError
from trunkline.server.openai.output import OutputPlan
from trunkline.server.openai.prompt import Conversation, Prompt, chat_prompt
from trunkline.server.state import Server


def fitting_prompt(
    server: Server,
    plan: OutputPlan,
    chat: Conversation,
    *,
    max_new_tokens: int | None,
    may_drop: bool,
) -> Prompt:
    """The prompt, if need be without the oldest turns.

    Turns go whole, a user's message with all up to the next one; leading system messages and the
    last turn stay. Room is kept for `max_new_tokens`, at most half of the context, or a quarter of
    it when there is no such limit.

    Raises:
        RequestError: it is too long all the same, or as it is when nothing may be dropped.
    """
    messages = chat.messages

    def prompt(first: int) -> Prompt:
        kept = replace(chat, messages=[*messages[:head], *messages[first:]])
        return chat_prompt(server, plan, kept)

    head = next((n for n, one in enumerate(messages) if not _is_system(one)), len(messages))
    if not may_drop:
        return prompt(head)
    context = server.openai.limits.context_length
    room = context // 4 if max_new_tokens is None else min(max_new_tokens, context // 2)
    turns = [n for n in range(head + 1, len(messages)) if messages[n]["role"] == "user"]
    starts = [head, *turns]

    def fitted(first: int) -> Prompt | None:
        try:
            fitting = prompt(first)
        except RequestError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return fitting if len(fitting.ids) <= context - room else None

    if (found := fitted(head)) is not None:
        return found
    low, high = 1, len(starts)  # the least number of turns to drop that fits is in [low, high]
    best: Prompt | None = None
    while low < high:
        middle = (low + high) // 2
        if (found := fitted(starts[middle])) is None:
            low = middle + 1
        else:
            best, high = found, middle
    return prompt(starts[-1]) if best is None else best


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")
