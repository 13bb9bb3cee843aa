"""The prompt of a response, which may be too long: `truncation` of `/v1/responses`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trunkline.engine.validation import RequestError
from trunkline.server.openai.chat import chat_prompt_ids, render_chat
from trunkline.server.state import Server

_OPEN_END: Final[dict[str, Any]] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
}


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


def count_prompt(
    server: Server, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> int:
    """The number of tokens of a prompt, however long.

    Raises:
        RequestError: the template refuses the chat.
    """
    with _named_input():
        text = render_chat(server, messages, **_OPEN_END, variables=variables)
    return len(server.tokenizer.encode_batch([text], add_special_tokens=False)[0])


def _prompt_ids(
    server: Server, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> list[int]:
    with _named_input():
        return chat_prompt_ids(server, messages, **_OPEN_END, variables=variables)


@contextlib.contextmanager
def _named_input() -> Iterator[None]:
    """Errors about `messages` speak of `input`: clients know no messages here."""
    try:
        yield
    except RequestError as error:
        if error.param != "messages":
            raise
        words = error.message.replace("messages", "input", 1)
        raise RequestError(words, "input", error.status, error.code) from error
