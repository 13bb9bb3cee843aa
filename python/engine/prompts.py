"""What every endpoint asks of its prompts: that they fit; and how several of a body are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trunkline.engine.validation import Limits, RequestError


class TextEncoder(Protocol):
    """What is needed of a tokenizer here."""

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text."""

    def most_chars(self, tokens: int) -> int | None:
        """No text of more characters becomes so few tokens; None: no bound is known."""


def check_prompt(prompt_ids: Sequence[int], name: str, limits: Limits, new_tokens: int = 1) -> None:
    """Check that a prompt is not empty and leaves room for so many tokens.

    Raises:
        RequestError: it does not; the message has both numbers.
    """
    if not prompt_ids:
        raise RequestError(f"{name} is empty: a prompt needs at least one token.", name)
    if len(prompt_ids) + new_tokens > limits.context_length:
        kept = " (one token is kept for the answer)" if new_tokens else ""
        raise RequestError(
            f"{name} has {len(prompt_ids)} tokens, which is longer than the model's context length "
            f"of {limits.context_length} tokens allows{kept}.",
            name,
            code="context_length_exceeded",
        )


def check_samples(count: int, limits: Limits) -> None:
    """Check how many samples one body asks for in all.

    Raises:
        RequestError: too many; the message has both numbers.
    """
    if count > limits.max_prompts:
        raise RequestError(
            f"prompts times n are {count} samples, the limit is {limits.max_prompts} in all.", "n"
        )


def check_length(text: str, name: str, tokenizer: TextEncoder, limits: Limits) -> None:
    """Check that a text is not too long to be worth tokenising: `check_prompt` would refuse it.

    Raises:
        RequestError: it is; the message has both numbers.
    """
    most = tokenizer.most_chars(limits.context_length)
    if most is not None and len(text) > most:
        raise RequestError(
            f"{name} has {len(text)} characters, which are more tokens than the model's context "
            f"length of {limits.context_length} tokens allows ({most} characters at the very "
            "most).",
            name,
            code="context_length_exceeded",
        )


def row_ids(rid: str, count: int) -> list[str]:
    """The id of each of a body's prompts: its own where there is one."""
    return [rid] if count == 1 else [f"{rid}_{row}" for row in range(count)]
