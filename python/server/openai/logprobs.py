"""Log-probs in the shapes of OpenAI's chat and completions endpoints."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence

from trunkline.engine.messages import Logprobs
from trunkline.engine.outputs import reported_logprob
from trunkline.server.token_text import TokenTexts


def chat_logprobs(
    ids: Sequence[int], logprobs: Logprobs | None, texts: TokenTexts
) -> dict[str, object] | None:
    """`logprobs` of a chat choice: one entry per token; None when none were asked for."""
    if logprobs is None:
        return None
    content = []
    for position, value in enumerate(logprobs.values):
        top = logprobs.top[position] if logprobs.top else []
        entry = _entry(ids[position], value, texts)
        entry["top_logprobs"] = [
            _entry(token, chance, texts) for chance, token in top if math.isfinite(chance)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, object]:
    return {
        "token": texts.text(token),
        "bytes": list(texts.raw(token)),
        "logprob": reported_logprob(logprob),
    }


class TextOffsets:
    """Where tokens begin in the text of a completion, in characters.

    A part of a character begins where the character does. Tokens come in order: those of the prompt
    if it is echoed, then those of the answer.
    """

    def __init__(self, texts: TokenTexts, echoed: str, *, skips_special: bool) -> None:
        self._texts = texts
        self._echoed = echoed
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def of_prompt(self, token: int) -> int:
        """Where the next token of the echoed prompt begins."""
        offset = self._next
        piece = self._decoder.decode(self._texts.raw(token))
        if not self._echoed.startswith(piece, offset):
            if self._texts.is_hidden(token):
                piece = ""  # a BOS, which the tokenizer puts before the text
            elif offset == 0 and piece.startswith(" "):
                piece = piece[1:]  # the tokenizer's own
        self._next = offset + len(piece)
        return offset

    def of_output(self, token: int) -> int:
        """Where the next token of the answer begins."""
        self._next = offset = max(self._next, len(self._echoed))
        if not (self._skips_special and self._texts.is_hidden(token)):
            self._next += len(self._decoder.decode(self._texts.raw(token)))
        return offset


def completion_logprobs(
    ids: Sequence[int],
    logprobs: Logprobs | None,
    texts: TokenTexts,
    offset_of: Callable[[int], int],
) -> dict[str, list[object]] | None:
    """`logprobs` of a completions choice; None when none were asked for.

    Args:
        ids: the tokens that `logprobs` speaks of.
        logprobs: what is known of them.
        texts: single tokens as text.
        offset_of: where the next token begins in the text.
    """
    if logprobs is None:
        return None
    block: dict[str, list[object]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for position, value in enumerate(logprobs.values):
        known = not math.isnan(value)
        block["tokens"].append(texts.text(ids[position]))
        block["token_logprobs"].append(reported_logprob(value))
        top = logprobs.top[position] if logprobs.top else []
        best: dict[str, float] = {}
        for chance, token in top if known else ():
            if math.isfinite(chance):
                best.setdefault(texts.text(token), chance)  # two tokens may have one text
        block["top_logprobs"].append(best or None)
        block["text_offset"].append(offset_of(ids[position]))
    return block
