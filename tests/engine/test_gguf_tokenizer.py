"""Tokenizers built from GGUF metadata give the ids of the model's own tokenizer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.checkpoints import SPECIAL_TOKENS, TEXT, tiny_tokenizer
from tests.gguf_files import TinyGguf, merges_of
from tests.texts import TEXTS, random_texts
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.tokenizer import Tokenizer
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.gguf_tokenizer import LLAMA3_PATTERN, PRE_TOKENIZERS

SAMPLES = (*TEXTS, *random_texts(300))


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer, ignore_merges: bool = False
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of 800 tokens with this pre-tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXT, *SAMPLES], trainer)
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def llama3_pattern() -> str:
    pattern: str = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    return pattern


def from_gguf(path: Path, pre: str, tokenizer: tokenizers.Tokenizer, **metadata: Any) -> Tokenizer:
    size = tokenizer.get_vocab_size()
    tiny = TinyGguf(pre=pre, tokenizer=tokenizer, config={"vocab_size": size}, metadata=metadata)
    tiny.write(path)
    return open_checkpoint(ModelOptions(model_path=str(path))).tokenizer


def gpt2_reference() -> tokenizers.Tokenizer:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    merges = [tuple(merge.split(" ")) for merge in merges_of(tokenizer)]
    reference = GPT2Tokenizer(tokenizer.get_vocab(), merges)._tokenizer
    reference.add_special_tokens(list(SPECIAL_TOKENS))
    return reference


def qwen2_reference() -> tokenizers.Tokenizer:
    import transformers.models.qwen2.tokenization_qwen2 as module

    tokenizer = trained(split(module.PRETOKENIZE_REGEX))
    merges = [tuple(merge.split(" ")) for merge in merges_of(tokenizer)]
    reference = Qwen2Tokenizer(tokenizer.get_vocab(), merges)._tokenizer
    reference.add_special_tokens(list(SPECIAL_TOKENS))
    return reference


def smollm_reference() -> tokenizers.Tokenizer:
    return trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    )


def llama3_reference() -> tokenizers.Tokenizer:
    return trained(split(llama3_pattern()), ignore_merges=True)


REFERENCES = {
    "gpt-2": gpt2_reference,
    "qwen2": qwen2_reference,
    "smollm": smollm_reference,
    "llama-bpe": llama3_reference,
}


@pytest.mark.parametrize("pre", REFERENCES)
def test_ids_are_those_of_the_reference(tmp_path: Path, pre: str) -> None:
    reference = REFERENCES[pre]()
    ours = from_gguf(tmp_path / "tiny.gguf", pre, reference)
    expected = reference.encode_batch(list(SAMPLES), add_special_tokens=False)
    found = ours.encode_batch(SAMPLES, add_special_tokens=False)
    for text, ids, encoding in zip(SAMPLES, found, expected, strict=True):
        assert ids == encoding.ids, text
        normal = reference.normalizer.normalize_str(text) if reference.normalizer else text
        assert ours.decode(ids, skip_special_tokens=False) == normal


def test_the_references_differ() -> None:
    """Each pre-tokenizer is told apart by the texts."""
    pieces = {
        pre: [REFERENCES[pre]().pre_tokenizer.pre_tokenize_str(text) for text in TEXTS]
        for pre in REFERENCES
    }
    for pre, found in pieces.items():
        assert all(found != other for name, other in pieces.items() if name != pre)


def test_qwen2_normalises_to_composed_characters(tmp_path: Path) -> None:
    ours = from_gguf(tmp_path / "tiny.gguf", "qwen2", qwen2_reference())
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


def test_llama3_pattern_is_that_of_the_converter() -> None:
    assert llama3_pattern() == LLAMA3_PATTERN


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("camelCase HTTPServer", ["camel", "Case", "ĠHTTPServer"]),
        ("1234", ["1", "2", "3", "4"]),
        ("don't", ["don", "'t"]),
        ("a/b\n//\nc", ["a", "/b", "Ċ", "//Ċ", "c"]),
        ("x  y", ["x", "Ġ", "Ġy"]),
    ],
)
def test_tekken_splits_at_case_and_digits(text: str, pieces: list[str]) -> None:
    steps = PRE_TOKENIZERS["tekken"].steps
    tokenizer = trained(split(steps[0]["pattern"]["Regex"]))
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces


# Ids that llama.cpp gives for the default model's file.
SMOLLM2_IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "a  b   c    d": [81, 216, 278, 256, 265, 333, 287],
    " \n \n\n  x": [3717, 216, 8866, 1792],
    "\t\tindent\n\t x": [197, 197, 32166, 3354, 1792],
    "3.14159": [35, 30, 33, 36, 33, 37, 41],
    "1 2  3": [33, 216, 34, 256, 35],
    "don't CAN'T I'M 'tis": [12420, 982, 27190, 23, 68, 339, 23, 61, 637, 34818],
    "한국어": [33085, 246, 181, 130, 251, 183, 240, 129],
    "Россия и": [155, 250, 6485, 9382, 9382, 37187, 29972],
    "é e\u0301": [2756, 297, 151, 219],
    "\u200bzero\u200dwidth": [321, 229, 13723, 321, 231, 6930],
    "!!!???...---(x)": [29646, 16693, 47, 2026, 5583, 24, 104, 25],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
}


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_ids_of_the_default_model(text: str) -> None:
    tokenizer = open_checkpoint(ModelOptions()).tokenizer
    assert tokenizer.encode(text) == SMOLLM2_IDS[text]
    assert tokenizer.decode(SMOLLM2_IDS[text], skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "metadata", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True}, [1], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ("smollm", {"add_eos_token": True}, [], [2]),
        ("llama-bpe", {}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("tekken", {}, [1], []),
        ("qwen2", {}, [], []),
    ],
)
def test_what_is_put_around_a_text(
    tmp_path: Path, pre: str, metadata: dict[str, bool], before: list[int], after: list[int]
) -> None:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    ours = from_gguf(tmp_path / "tiny.gguf", pre, tiny_tokenizer(add_bos=False), **keys)
    plain = ours.encode("the fox", add_special_tokens=False)
    assert ours.encode("the fox") == [*before, *plain, *after]
    assert ours.encode("") == [*before, *after]


def test_named_and_special_tokens(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 0}
    ours = from_gguf(tmp_path / "tiny.gguf", "smollm", tiny_tokenizer(), **keys)
    assert ours.named_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "unk_token": "<unk>",
    }
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, 0)
    assert ours.special_ids == {0, 1, 2, 3, 4}
    assert ours.decode([1, *ours.encode("fox"), 2]) == "fox"


def test_tokens_of_the_user_are_whole_but_not_special(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    ours = from_gguf(tmp_path / "tiny.gguf", "smollm", tokenizer)
    ids = ours.encode("a<tool_call>b")
    assert ours.id_of("<tool_call>") in ids
    assert ours.decode(ids) == "a<tool_call>b"


def test_padding_of_the_vocabulary_matches_no_text(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    TinyGguf(pre="llama-bpe", config={"vocab_size": 320}).write(path)
    ours = open_checkpoint(ModelOptions(model_path=str(path))).tokenizer
    assert ours.vocab_size == 300
    assert ours.id_of("[PAD310]") is None
    assert 310 not in ours.encode("[PAD310]")
    assert ours.decode([310]) == ""


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "llama"}, "tokenizer kind 'llama' is not supported; 'gpt2'.*--tokenizer-path"),
        ({"model": None}, "tokenizer kind None"),
        ({"pre": "default"}, "pre-tokenizer 'default' is not supported; gpt-2, smollm, llama-bpe"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"add_space_prefix": True}, "add_space_prefix is not supported"),
        ({"merges": ["a b c"]}, "a merge does not consist of two tokens"),
        ({"merges": ["nosuch token"]}, "inconsistent"),
        ({"token_type": [1, 1]}, "320 tokens but 2 token types"),
        ({"bos_token_id": 999}, "bos_token_id is 999, there are 320 tokens"),
        (
            {"bos_token_id": None, "add_bos_token": True},
            "add_bos_token is set, but there is no bos",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    TinyGguf(metadata=keys).write(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(ModelOptions(model_path=str(tmp_path / "tiny.gguf")))
    with pytest.raises(CheckpointError, match=message):
        _ = checkpoint.tokenizer
