"""Helpers for the tests of schema grammars: canonical spellings, acceptance, random texts."""

import itertools
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import xgrammar

MAX_SPELLINGS = 720
_CLOSING = b'"}],0'


def spellings(value: Any) -> Iterator[str]:
    """The compact serialisations of a value: every order of keys, shortest plain numbers."""
    if isinstance(value, dict):
        members = [
            [f"{json.dumps(key, ensure_ascii=False)}:{text}" for text in _few(item)]
            for key, item in value.items()
        ]
        for order in itertools.permutations(members):
            yield from ("{" + ",".join(texts) + "}" for texts in itertools.product(*order))
    elif isinstance(value, list):
        for texts in itertools.product(*map(_few, value)):
            yield "[" + ",".join(texts) + "]"
    elif isinstance(value, float):
        number = Decimal(repr(value))
        whole = number == number.to_integral_value()
        yield str(int(number)) if whole else format(number, "f")
    else:
        yield json.dumps(value, ensure_ascii=False)


def _few(value: Any) -> list[str]:
    return list(itertools.islice(spellings(value), 24))


def accepts(grammar: str, text: str) -> bool:
    """Whether xgrammar derives a text from EBNF."""
    matcher = xgrammar.GrammarMatcher(_compiled(grammar), terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


def accepts_value(grammar: str, value: Any) -> bool:
    """Whether some canonical serialisation of a value is derived."""
    texts = itertools.islice(spellings(value), MAX_SPELLINGS)
    return any(accepts(grammar, text) for text in texts)


def random_texts(grammar: str, seed: int, count: int, length: int = 120) -> Iterator[str]:
    """Texts of a grammar, drawn byte by byte; those that do not end soon are left out."""
    chooser = random.Random(seed)
    mask = xgrammar.allocate_token_bitmask(1, 257)
    for _ in range(count):
        matcher = xgrammar.GrammarMatcher(_compiled(grammar))
        written = bytearray()
        while len(written) < 4 * length:
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = bits[:257].nonzero()[0].tolist()
            token = _choose(allowed, chooser, hurry=len(written) > length)
            assert matcher.accept_token(token), "the mask allows what the matcher refuses"
            if token == 256:
                yield written.decode()
                break
            written.append(token)


def _choose(allowed: list[int], chooser: random.Random, hurry: bool) -> int:
    if 256 in allowed and (hurry or chooser.random() < 0.3):
        return 256
    closing = [byte for byte in _CLOSING if byte in allowed]
    if closing and (hurry or chooser.random() < 0.4):
        return closing[0] if hurry else chooser.choice(closing)
    return chooser.choice(allowed)


@lru_cache(maxsize=1)
def _compiler() -> xgrammar.GrammarCompiler:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(tokens, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@lru_cache(maxsize=64)
def _compiled(grammar: str) -> xgrammar.CompiledGrammar:
    return _compiler().compile_grammar(grammar)
