"""Single tokens as text and bytes, as log-prob lists show them."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from trunkline.engine.prompts import TextEncoder


class Tokenizer(TextEncoder, Protocol):
    """What the server needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless asked not to."""

    def token_of(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""


class TokenTexts:
    """Texts of tokens as they stand inside a text: a leading space is kept.

    Decoders strip the space of a text's first token, so each token is decoded behind another one,
    whose text is then cut off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode_batch(["a"], add_special_tokens=False)[0][-1:]
        self._anchor_text = tokenizer.decode(self._anchor, skip_special_tokens=False)
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.is_hidden = lru_cache(maxsize=1 << 16)(self._is_hidden)

    def _text(self, token_id: int) -> str:
        joined = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        return joined[len(self._anchor_text) :]

    def _is_hidden(self, token_id: int) -> bool:
        """Whether texts without special tokens do not show it."""
        joined = self._tokenizer.decode([*self._anchor, token_id])
        return joined == self._anchor_text and self.text(token_id) != ""

    def raw(self, token_id: int) -> bytes:
        """The bytes of a token, those of a part of a character too."""
        text = self.text(token_id)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        spelled = self._tokenizer.token_of(token_id) or ""
        if spelled.startswith("<0x") and spelled.endswith(">") and len(spelled) == 6:
            return bytes.fromhex(spelled[3:5])
        letters = byte_letters()
        if all(letter in letters for letter in spelled):
            return bytes(letters[letter] for letter in spelled)
        return text.encode()


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies spell bytes.

    Printable Latin-1 stands for itself; the other bytes take letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
