"""Prompts as OpenAI's clients write them: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from typing import Any

from trunkline.engine.native_request import RequestContext, tokenise
from trunkline.engine.prompts import check_prompt
from trunkline.engine.validation import RequestError, parse_token_ids, shown


def parse_inputs(
    value: Any, name: str, context: RequestContext, new_tokens: int = 1
) -> tuple[list[list[int]], list[str] | None]:
    """Token ids of every prompt, and their texts if they came as text.

    Args:
        value: what the client sent.
        name: of the field that it stands in.
        context: tokenizer and limits.
        new_tokens: for how many more there must be room.

    Raises:
        RequestError: it is none of these, or a prompt is empty or too long.
    """
    texts = None
    if isinstance(value, str):
        texts, names = [value], [name]
    elif isinstance(value, list) and any(isinstance(one, str) for one in value):
        texts, names = value, [f"{name}[{row}]" for row in range(len(value))]
    if texts is None:
        return _id_prompts(value, name, context, new_tokens), None
    _check_rows(len(texts), name, context)
    prompts = tokenise(texts, names, context)
    for row_name, ids in zip(names, prompts, strict=True):
        check_prompt(ids, row_name, context.limits, new_tokens)
    return prompts, texts


def _id_prompts(value: Any, name: str, context: RequestContext, new_tokens: int) -> list[list[int]]:
    if not isinstance(value, list):
        raise RequestError(
            f"{name} must be a string, a list of strings, a list of token ids or a list of such "
            f"lists, got {shown(value)}.",
            name,
        )
    nested = any(isinstance(one, list) for one in value)
    rows = value if nested else [value]
    _check_rows(len(rows), name, context)
    for row, ids in enumerate(rows):
        row_name = f"{name}[{row}]" if nested else name
        parse_token_ids(ids, row_name, context.limits, most=2**31)
        check_prompt(ids, row_name, context.limits, new_tokens)
    return rows


def _check_rows(count: int, name: str, context: RequestContext) -> None:
    if count > context.limits.max_prompts:
        raise RequestError(
            f"{name} must have at most {context.limits.max_prompts} rows, got {count}.", name
        )
