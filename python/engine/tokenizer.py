"""Text to token ids and back, around the `tokenizers` library.

It knows nothing of chats or of model files other than tokenizer files; `weights/` decides which
files to read. Incremental decoding of a stream is the Rust core's work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import tokenizers

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# How many times fewer characters a text may have after a normalizer.
_SHRINKS: Final[Mapping[str, int]] = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1}


class TokenizerError(ValueError):
    """Text or ids that the tokenizer cannot take; the message says which and why."""


class Tokenizer:
    """A tokenizer and the names of its special tokens. Immutable; threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, named_tokens: Mapping[str, str]) -> None:
        """Wrap `backend`, which is changed: truncation and padding are switched off.

        Args:
            backend: the tokenizer.
            named_tokens: special tokens by role (`bos_token`: "<s>", ...); every token must exist.

        Raises:
            TokenizerError: a named token is not in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._named_tokens = dict(named_tokens)
        for role, token in self._named_tokens.items():
            if backend.token_to_id(token) is None:
                raise TokenizerError(f"{role} {token!r} is not in the vocabulary")
        self._special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def named_tokens(self) -> dict[str, str]:
        """Special tokens by role: what chat templates see as `bos_token`, `eos_token`, ..."""
        return dict(self._named_tokens)

    @property
    def bos_token(self) -> str | None:
        return self._named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._named_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._named_tokens.get("pad_token")

    @property
    def bos_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        return self._named_id("pad_token")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id; the model's own `vocab_size` may be larger."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless asked not to."""
        return self._special_ids

    def id_of(self, token: str) -> int | None:
        """Id of exactly this token, None if it is not in the vocabulary."""
        index: int | None = self._backend.token_to_id(token)
        return index

    def token_of(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (byte-level letters), None if there is none."""
        if not 0 <= token_id < 1 << 32:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; see `encode_batch`."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, with the GIL released and nothing truncated or padded.

        Special tokens spelled out inside a text become their ids.

        Args:
            texts: the texts.
            add_special_tokens: add what the tokenizer puts around a text of its own, such as a
                BOS. A rendered chat brings its own: pass False.

        Raises:
            TokenizerError: a text holds a lone surrogate.
        """
        for text in texts:
            _refuse_surrogates(text)
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def most_chars(self, tokens: int) -> int | None:
        """No text of more characters becomes so few tokens; None: no bound is known."""
        longest = self._longest_token
        return None if longest is None else longest * tokens

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids that name no token (padding of the vocabulary) give no text.

        Raises:
            TokenizerError: an id is negative or does not fit 32 bits.
        """
        for token_id in ids:
            if not 0 <= token_id < 1 << 32:
                raise TokenizerError(f"token id {token_id} is out of range (0 to 2**32 - 1)")
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def _longest_token(self) -> int | None:
        """The most characters that a token stands for; None where one may swallow any number."""
        parts = json.loads(self._backend.to_str())
        greedy = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
        spelled_out = parts["model"].get("byte_fallback") or "ByteLevel" in {
            one["type"] for one in _steps(parts["pre_tokenizer"])
        }
        shrinks = [_shrink(one) for one in _steps(parts["normalizer"])]
        if parts["model"]["type"] != "BPE" or greedy or not spelled_out or 0 in shrinks:
            return None
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(map(len, vocabulary)) * max(shrinks, default=1)

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        text: str = self._backend.to_str()
        return text

    def _named_id(self, role: str) -> int | None:
        token = self._named_tokens.get(role)
        return None if token is None else self.id_of(token)


def _steps(component: Any) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer as tokenizer.json has it, sequences laid flat."""
    if component is None:
        return []
    for key in ("normalizers", "pretokenizers"):
        if key in component:
            return [step for one in component[key] for step in _steps(one)]
    return [component]


def _shrink(normalizer: Mapping[str, Any]) -> int:
    """How many times fewer characters a text may have after a normalizer; 0: no bound is known."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return int(replaced is not None and len(replaced) <= len(normalizer["content"]))
    return _SHRINKS.get(normalizer["type"], 0)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}: it is not valid Unicode"
        ) from error
