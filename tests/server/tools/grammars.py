"""Structural tags against a vocabulary of bytes and special tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import torch
import xgrammar

BYTES = 256


class Vocabulary:
    """Tokens 0 to 255 are bytes, then come special tokens, then the end."""

    def __init__(self, special: Sequence[str]) -> None:
        self.special = list(special)
        self.end = BYTES + len(self.special)
        names = [f"<0x{byte:02X}>" for byte in range(BYTES)]
        # A byte that no text has: only a grammar that names the token allows it.
        spelled = [*names, *["<0xFF>" for _ in self.special], "<end>"]
        info = xgrammar.TokenizerInfo(
            spelled,
            vocab_type=xgrammar.VocabType.BYTE_FALLBACK,
            stop_token_ids=[self.end],
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._pattern = re.compile("|".join(map(re.escape, self.special)) or "(?!)")

    def matcher(self, tag: str) -> xgrammar.GrammarMatcher:
        for index, text in enumerate(self.special):
            tag = tag.replace(f'"token": "{text}"', f'"token": {BYTES + index}')
        return xgrammar.GrammarMatcher(self.compiler.compile_structural_tag(tag))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = []
        position = 0
        for found in self._pattern.finditer(text):
            ids += text[position : found.start()].encode()
            ids.append(BYTES + self.special.index(found.group()))
            position = found.end()
        return [*ids, *text[position:].encode()]

    def text(self, ids: Sequence[int]) -> str:
        parts = [bytes([one]) if one < BYTES else self.special[one - BYTES].encode() for one in ids]
        return b"".join(parts).decode(errors="replace")

    def accepts(self, tag: str, text: str) -> bool:
        """Whether a text is a whole output that masks let through."""
        matcher = self.matcher(tag)
        return all(
            one in self._allowed(matcher) and matcher.accept_token(one)
            for one in [*self.ids(text), self.end]
        )

    def _allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        mask = xgrammar.allocate_token_bitmask(1, self.end + 1)
        matcher.fill_next_token_bitmask(mask)
        words = mask.to(torch.int64)[0].tolist()
        return [one for one in range(self.end + 1) if words[one // 32] >> (one % 32) & 1]

    def sampled(self, tag: str, seed: int, limit: int = 2000) -> str | None:
        """What a model of no sense writes, in a hurry to end; None: it did not."""
        generator = random.Random(seed)
        matcher = self.matcher(tag)
        ids: list[int] = []
        for step in range(limit):
            allowed = self._allowed(matcher)
            hurried = [one for one in allowed if one == self.end or chr(one % 256) in '"}])>']
            one = generator.choice(hurried if hurried and step % 3 == 0 else allowed)
            assert matcher.accept_token(one)
            if one == self.end:
                return self.text(ids)
            ids.append(one)
        return None
