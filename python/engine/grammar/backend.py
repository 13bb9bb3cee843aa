"""What the engine needs of a library that compiles grammars and matches tokens against them.

Nothing here knows of requests, steps or processes. One implementation exists
(`xgrammar_backend.py`); another is one more class and a line in `launch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trunkline.engine.messages import GrammarSpec
from trunkline.engine.tokenizer import Tokenizer

Masks = npt.NDArray[np.int32]  # [rows, ceil(V / 32)]; bit i % 32 of word i / 32: id i is allowed


class GrammarError(ValueError):
    """A grammar cannot be compiled; the message is for its author."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of a model and what they stand for.

    `tokens` has an entry per id of the model, spelled as the tokenizer does, empty for ids that
    stand for no text: padding, and special tokens, which no grammar of characters may produce.
    `special_ids` has those by name. `end_ids` end a sequence.
    """

    tokens: list[str]
    special_ids: dict[str, int]
    end_ids: list[int]
    tokenizer_json: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
        """The vocabulary of a tokenizer, as wide as the model's."""
        tokens = [tokenizer.token_of(token_id) or "" for token_id in range(vocab_size)]
        special = [token_id for token_id in tokenizer.special_ids if token_id < vocab_size]
        names = {tokens[token_id]: token_id for token_id in special}
        for token_id in {*special, *end_ids}:
            tokens[token_id] = ""
        return cls(
            tokens=tokens,
            special_ids=names,
            end_ids=list(end_ids),
            tokenizer_json=tokenizer.to_json(),
        )


class Compiled(Protocol):
    """A grammar for one vocabulary. Immutable; matchers and threads share it."""

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""


class Matcher(Protocol):
    """Where one sequence is in its grammar. For one thread at a time."""

    def accept(self, token_id: int) -> bool:
        """Move on by a token; False, and nothing changed, where the grammar has none such."""

    def may_end(self) -> bool:
        """Whether what was accepted is a whole text of the grammar."""


class Backend(Protocol):
    """Compiles grammars and matches tokens, for one vocabulary."""

    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile and serialise a grammar. May take long, exhaust memory, or crash the process.

        Raises:
            GrammarError: it is malformed, or says what would not be enforced.
        """

    def load(self, data: bytes) -> Compiled:
        """What `compile` has made, here or in another process with the same vocabulary."""

    def matcher(self, compiled: Any) -> Matcher:
        """A matcher at the grammar's start."""

    def accept(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> list[bool]:
        """`Matcher.accept` for several at once."""

    def fill(self, matchers: Sequence[Any], masks: Masks, rows: Sequence[int]) -> None:
        """Write what each matcher allows next into its row: end ids too where its grammar may end.

        Raises:
            Exception: the backend has failed for one of them; rows may be half written.
        """
