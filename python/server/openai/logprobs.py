"""Log-probs in the shapes of OpenAI's chat and completions endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def completion_logprobs(
    ids: Sequence[int], logprobs: Logprobs | None, texts: TokenTexts, offset: int
) -> tuple[dict[str, list[object]] | None, int]:
    """`logprobs` of a completions choice, and the offset of the token that comes next.

    Args:
        ids: the tokens that `logprobs` speaks of.
        logprobs: None when none were asked for.
        texts: single tokens as text.
        offset: where the first token's text begins, in characters.
    """
    if logprobs is None:
        return None, offset
    block: dict[str, list[object]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for position, value in enumerate(logprobs.values):
        text = texts.text(ids[position])
        known = not math.isnan(value)
        block["tokens"].append(text)
        block["token_logprobs"].append(reported_logprob(value))
        top = logprobs.top[position] if logprobs.top else []
        best: dict[str, float] = {}
        for chance, token in top if known else ():
            if math.isfinite(chance):
                best.setdefault(texts.text(token), chance)  # two tokens may have one text
        block["top_logprobs"].append(best or None)
        block["text_offset"].append(offset)
        offset += len(text)
    return block, offset
