"""The prompt of a chat that may be too long: `truncation` of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trunkline.engine.validation import RequestError
from trunkline.server.openai.chat import chat_prompt_ids
from trunkline.server.state import Server


def fitting_prompt(
    server: Server,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    *,
    max_new_tokens: int | None,
    may_drop: bool,
) -> list[int]:
    """The prompt, if need be without the oldest turns.

    Turns go whole, a user's message with all up to the next one; leading system messages and the
    last turn stay. Room is kept for `max_new_tokens`, at most half of the context, or a quarter of
    it when there is no such limit.

    Raises:
        RequestError: it is too long all the same, or as it is when nothing may be dropped.
    """

    def prompt(first: int) -> list[int]:
        return _prompt_ids(server, [*messages[:head], *messages[first:]], variables)

    head = next((n for n, one in enumerate(messages) if not _is_system(one)), len(messages))
    if not may_drop:
        return prompt(head)
    context = server.openai.limits.context_length
    room = context // 4 if max_new_tokens is None else min(max_new_tokens, context // 2)
    turns = [n for n in range(head + 1, len(messages)) if messages[n]["role"] == "user"]
    starts = [head, *turns]

    def fitted(first: int) -> list[int] | None:
        try:
            ids = prompt(first)
        except RequestError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return ids if len(ids) <= context - room else None

    if (ids := fitted(head)) is not None:
        return ids
    low, high = 1, len(starts)  # the least number of turns to drop that fits is in [low, high]
    best: list[int] | None = None
    while low < high:
        middle = (low + high) // 2
        if (ids := fitted(starts[middle])) is None:
            low = middle + 1
        else:
            best, high = ids, middle
    return prompt(starts[-1]) if best is None else best


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _prompt_ids(
    server: Server, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> list[int]:
    try:
        return chat_prompt_ids(
            server,
            messages,
            add_generation_prompt=True,
            continue_final_message=False,
            variables=variables,
        )
    except RequestError as error:
        # Clients know no `messages` here.
        param = "input" if error.param == "messages" else error.param
        words = error.message.replace("messages", "input", 1) if param == "input" else error.message
        raise RequestError(words, param, error.status, error.code) from error
