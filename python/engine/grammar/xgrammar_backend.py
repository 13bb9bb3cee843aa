"""`Backend` on xgrammar.

Every compilation starts from an empty compiler: caching is the caller's. xgrammar imports
`transformers`, of which nothing is used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xgrammar

from trunkline.engine.grammar.backend import GrammarError, Masks, Vocabulary
from trunkline.engine.grammar.sources import Source, grammar_source
from trunkline.engine.messages import GrammarSpec

TRIED_TOKENS: Final = 24  # of every grammar, before it is let near other requests
BYTES_PER_SERIALISED: Final = 1.5  # of memory, for each of the text: 1.35 and less was measured
_BAD_ALLOC: Final = "std::bad_alloc"  # what a C++ library says when memory runs out


@dataclass(frozen=True, slots=True)
class XgrammarCompiled:
    """See `backend.Compiled`."""

    grammar: xgrammar.CompiledGrammar
    num_bytes: int


class XgrammarMatcher:
    """See `backend.Matcher`."""

    __slots__ = ("inner",)

    def __init__(self, inner: xgrammar.GrammarMatcher) -> None:
        self.inner = inner

    def accept(self, token_id: int) -> bool:
        return bool(self.inner.accept_token(token_id))

    def may_end(self) -> bool:
        return bool(self.inner.is_completed())


class XgrammarBackend:
    """See `backend.Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Prepare the vocabulary; `end_ids` must not be empty."""
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.tokenizer_json)
        self._special_ids = vocabulary.special_ids
        self._num_words = -(-len(vocabulary.tokens) // 32)
        self._info = xgrammar.TokenizerInfo(
            _spelled(vocabulary, found["vocab_type"]),
            vocab_type=found["vocab_type"],
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=vocabulary.end_ids,
            add_prefix_space=found["add_prefix_space"],
        )
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)

    def compile(self, spec: GrammarSpec) -> bytes:
        source = grammar_source(spec, self._special_ids)
        try:
            compiled = self._compile(source)
            first = self._tried(compiled)
            data = compiled.serialize_json().encode()
        except (RuntimeError, ValueError, TypeError) as error:
            if _BAD_ALLOC in str(error):
                raise MemoryError from error
            raise GrammarError(_reason(error)) from error
        if not first.any():
            raise GrammarError("no token of the model's vocabulary can begin it.")
        return data

    def _tried(self, compiled: xgrammar.CompiledGrammar) -> Masks:
        """Walk into a grammar: what crashes or hangs soon is to do so here. The first mask."""
        matcher = xgrammar.GrammarMatcher(compiled)
        choice = random.Random(0)
        masks = np.zeros((2, self._num_words), np.int32)
        for step in range(TRIED_TOKENS):
            row = min(step, 1)
            masks[row] = -1
            matcher.fill_next_token_bitmask(masks, row)
            bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
            ids = np.setdiff1d(np.flatnonzero(bits), self._info.stop_token_ids)
            if not ids.size or not matcher.accept_token(int(choice.choice(ids))):
                break
        return masks[:1]

    def _compile(self, source: Source) -> xgrammar.CompiledGrammar:
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        if source.kind == "structural_tag":
            return compiler.compile_structural_tag(source.text)
        return compiler.compile_grammar(source.text)

    def load(self, data: bytes) -> XgrammarCompiled:
        grammar = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)
        # Its own figure leaves most of it out, up to 95 %.
        num_bytes = max(int(grammar.memory_size_bytes), int(BYTES_PER_SERIALISED * len(data)))
        return XgrammarCompiled(grammar, num_bytes)

    def matcher(self, compiled: XgrammarCompiled) -> XgrammarMatcher:
        return XgrammarMatcher(xgrammar.GrammarMatcher(compiled.grammar))

    def accept(self, matchers: Sequence[XgrammarMatcher], token_ids: Sequence[int]) -> list[bool]:
        inner = [matcher.inner for matcher in matchers]
        return list(self._batch.batch_accept_token(inner, list(token_ids)))

    def fill(self, matchers: Sequence[XgrammarMatcher], masks: Masks, rows: Sequence[int]) -> None:
        masks[rows] = -1
        inner = [matcher.inner for matcher in matchers]
        self._batch.batch_fill_next_token_bitmask(inner, masks, list(rows))


def _reason(error: Exception) -> str:
    """The words of xgrammar without the clock time and the source file before them."""
    words = str(error).strip().split("\n")[0]
    head, found, tail = words.partition(": ")
    return tail if found and head.startswith("[") and ".cc:" in head else words


def _spelled(vocabulary: Vocabulary, kind: xgrammar.VocabType) -> list[str] | list[bytes]:
    """The tokens, with a spelling for special ones that only their names can ask for.

    xgrammar never allows a token without a text, and no text holds the byte 0xFF.
    """
    special = set(vocabulary.special_ids.values()).difference(vocabulary.end_ids)
    tokens = vocabulary.tokens
    if kind == xgrammar.VocabType.RAW:
        return [b"\xff" if index in special else one.encode() for index, one in enumerate(tokens)]
    is_byte_level = kind == xgrammar.VocabType.BYTE_LEVEL
    no_text = "\N{LATIN SMALL LETTER Y WITH DIAERESIS}" if is_byte_level else "<0xFF>"
    return [no_text if index in special else one for index, one in enumerate(tokens)]
