"""Byte-level BPE tokenizers from GGUF metadata, as the model's own tokenizer.json has them.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) rather than describing it, so each name
supported here is written out as the tokenizer.json of the models that bear it. A name that is not
listed is refused: a near miss would produce plausible but wrong token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.tokenizer import Tokenizer
from trunkline.engine.weights.gguf_file import GgufFile, Value

Component = dict[str, Any]

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_PATTERN = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    steps: tuple[Component, ...]
    normalizer: Component | None = None
    ignore_merges: bool = False  # a piece that is itself a token stays whole
    add_bos: bool = False  # what a file that does not say means


def _split(pattern: str) -> Component:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(*, use_regex: bool) -> Component:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


_GPT2 = _PreTokenizer(steps=(_byte_level(use_regex=True),))
_DIGITS = _PreTokenizer(
    steps=({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
)
_LLAMA3 = _PreTokenizer(
    steps=(_split(LLAMA3_PATTERN), _byte_level(use_regex=False)),
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = _PreTokenizer(
    steps=(_split(QWEN2_PATTERN), _byte_level(use_regex=False)), normalizer={"type": "NFC"}
)
_TEKKEN = _PreTokenizer(
    steps=(_split(TEKKEN_PATTERN), _byte_level(use_regex=False)),
    ignore_merges=True,
    add_bos=True,
)

PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
_NAMED_TOKENS = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        CheckpointError: a kind or pre-tokenizer that is not supported, or metadata that contradict
            themselves; the message names what and, where there is one, the way out.
    """
    return _Builder(file).build()


class _Builder:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        kind = self._get("model", str)
        if kind != "gpt2":
            raise self._refusal(
                f"tokenizer kind {kind!r} is not supported; 'gpt2' (byte-level BPE) is"
            )
        name = self._get("pre", str)
        if name is None or name not in PRE_TOKENIZERS:
            raise self._refusal(
                f"pre-tokenizer {name!r} is not supported; {', '.join(PRE_TOKENIZERS)} are"
            )
        if self._get("add_space_prefix", bool):
            raise self._refusal("add_space_prefix is not supported for kind 'gpt2'")
        self._pre: _PreTokenizer = PRE_TOKENIZERS[name]
        self._tokens = self._list("tokens", str) or []
        self._kinds = self._list("token_type", int) or [_NORMAL] * len(self._tokens)
        if len(self._kinds) != len(self._tokens):
            raise self._refusal(f"{len(self._tokens)} tokens but {len(self._kinds)} token types")

    def build(self) -> Tokenizer:
        named = self._named_tokens()
        description = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "normalizer": self._pre.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(self._pre.steps)},
            "post_processor": self._post_processor(named),
            "decoder": _byte_level(use_regex=True),
            "model": self._model(),
        }
        try:
            backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        except Exception as error:  # the library raises bare Exception
            raise self._refusal(f"the tokenizer is inconsistent: {error}") from error
        return Tokenizer(backend, named)

    def _model(self) -> Component:
        merges = [merge.split(" ") for merge in self._list("merges", str) or []]
        if any(len(pair) != 2 for pair in merges):
            raise self._refusal("a merge does not consist of two tokens")
        # Unused ids only pad the vocabulary: as tokens they could match text.
        vocab = {
            token: index
            for index, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind != _UNUSED
        }
        if len(vocab) != len(self._kinds) - self._kinds.count(_UNUSED):
            raise self._refusal("a token is listed twice")
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": self._pre.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        }

    def _added_tokens(self) -> list[Component]:
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for index, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ]

    def _named_tokens(self) -> dict[str, str]:
        named = {}
        for key, role in _NAMED_TOKENS.items():
            token_id = self._get(key, int)
            if token_id is None:
                continue
            if not 0 <= token_id < len(self._tokens):
                raise self._refusal(f"{key} is {token_id}, there are {len(self._tokens)} tokens")
            if self._kinds[token_id] != _UNUSED:
                named[role] = self._tokens[token_id]
        return named

    def _post_processor(self, named: Mapping[str, str]) -> Component | None:
        """What is put around a text when special tokens are asked for."""
        template: list[Component] = [{"Sequence": {"id": "A", "type_id": 0}}]
        around: dict[str, Component] = {}
        for flag, role, default, position in (
            ("add_bos_token", "bos_token", self._pre.add_bos, 0),
            ("add_eos_token", "eos_token", False, 1),
        ):
            wanted = self._get(flag, bool)
            if not (default if wanted is None else wanted):
                continue
            if role not in named:
                raise self._refusal(f"{flag} is set, but there is no {role}")
            token = named[role]
            template.insert(position * len(template), {"SpecialToken": {"id": token, "type_id": 0}})
            around[token] = {"id": token, "ids": [self._tokens.index(token)], "tokens": [token]}
        if not around:
            return None
        pair = [*template, {"Sequence": {"id": "B", "type_id": 1}}]
        return {
            "type": "TemplateProcessing",
            "single": template,
            "pair": pair,
            "special_tokens": around,
        }

    def _get(self, key: str, kind: type[Value]) -> Value | None:
        return self._file.get(f"tokenizer.ggml.{key}", kind)

    def _list(self, key: str, kind: type[Value]) -> list[Value] | None:
        return self._file.get_list(f"tokenizer.ggml.{key}", kind)

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file.path}: {what}. Give the model's original tokenizer files with "
            "--tokenizer-path"
        )
