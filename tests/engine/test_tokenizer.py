"""Tokenizers in Hugging Face files: ids, special tokens, and what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.checkpoints import TinyCheckpoint, tiny_tokenizer, write_json, write_tokenizer
from tests.texts import TEXTS, random_texts
from tokenizers import normalizers
from transformers import AutoTokenizer

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.tokenizer import Tokenizer, TokenizerError
from trunkline.engine.weights.tokenizer_files import TokenizerFiles

SAMPLES = (*TEXTS, *random_texts(100))


def load(directory: Path, **config: Any) -> Tokenizer:
    """The tokenizer of a directory, after merging `config` into its tokenizer_config.json."""
    path = directory / "tokenizer_config.json"
    if config:
        write_json(path, json.loads(path.read_text()) | config)
    return TokenizerFiles(directory).load()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_those_of_transformers(directory: Path, add_special_tokens: bool) -> None:
    TinyCheckpoint().write(directory)
    ours, theirs = load(directory), AutoTokenizer.from_pretrained(directory)
    assert len(theirs) == ours.vocab_size
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    found = ours.encode_batch(SAMPLES, add_special_tokens)
    for text, ids in zip(SAMPLES, found, strict=True):
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ids == ours.encode(text, add_special_tokens)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@pytest.mark.parametrize("text", SAMPLES)
def test_texts_survive_the_round_trip(text: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_json_text_is_the_whole_tokenizer(directory: Path) -> None:
    ours = load(directory)
    again = tokenizers.Tokenizer.from_str(ours.to_json())
    for text in TEXTS:
        assert again.encode(text).ids == ours.encode(text)


def test_nothing_is_truncated_or_padded(directory: Path) -> None:
    backend = tiny_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    ours = load(directory)
    assert len(ours.encode("the quick brown fox")) > 4
    assert ours.encode_batch(["", "the"]) == [[1], ours.encode("the")]


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff", "\ud83d half an emoji"])
def test_lone_surrogates_are_refused(text: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    with pytest.raises(TokenizerError, match=r"lone surrogate \(U\+D[8-9A-F]"):
        tokenizer.encode(text)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", text])


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**70])
def test_ids_out_of_range_are_refused(token_id: int) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    with pytest.raises(TokenizerError, match=f"token id {token_id} is out of range"):
        tokenizer.decode([5, token_id])
    assert tokenizer.token_of(token_id) is None


def test_ids_without_a_token_give_no_text() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    ids = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.decode([*ids, 319, 2**32 - 1]) == "fox"


def test_tokens_by_id_and_back() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    assert tokenizer.id_of("<s>") == 1
    assert tokenizer.token_of(1) == "<s>"
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.token_of(300) is None


def test_threads_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    expected = [tokenizer.encode(text) for text in SAMPLES]
    found: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: found.append(tokenizer.encode_batch(SAMPLES)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_named_tokens_come_as_text_or_object(directory: Path) -> None:
    eos = {"content": "<|im_end|>", "lstrip": False, "special": True}
    ours = load(directory, eos_token=eos, bos_token=None, pad_token="<unk>")
    assert (ours.eos_token, ours.eos_id) == ("<|im_end|>", 4)
    assert (ours.bos_token, ours.bos_id) == (None, None)
    assert (ours.pad_token, ours.pad_id) == ("<unk>", 0)


def test_the_older_map_fills_what_the_config_leaves_out(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    write_json(directory / "special_tokens_map.json", {"eos_token": {"content": "</s>"}})
    assert load(directory).named_tokens == {"eos_token": "</s>"}


def test_a_tokenizer_without_small_files_is_read(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    ours = load(directory)
    assert ours.named_tokens == {}
    assert ours.encode("")


def test_a_named_token_outside_the_vocabulary(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(directory, pad_token="[PAD]").pad_token is None
    assert "pad_token '[PAD]' is not in the vocabulary" in caplog.text
    with pytest.raises(CheckpointError, match=r"eos_token '<none>' is not in the vocabulary"):
        load(directory, eos_token="<none>")


def described(content: str) -> dict[str, Any]:
    flags = ("lstrip", "rstrip", "normalized", "single_word")
    return {"content": content, "special": True} | dict.fromkeys(flags, False)


def test_tokens_that_only_the_config_knows_are_added(directory: Path) -> None:
    added = {"1": described("<s>"), "300": described("<a>"), "301": described("<b>")}
    ours = load(directory, added_tokens_decoder=added, eos_token="<b>")
    theirs = AutoTokenizer.from_pretrained(directory)
    assert ours.encode("x<b><a>") == theirs.encode("x<b><a>")
    assert ours.eos_id == 301
    assert ours.vocab_size == 302
    assert ours.decode(ours.encode("x<b>")) == "x"


def test_tokens_whose_ids_disagree_are_named(directory: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"gives '<a>' the id 305, tokenizer.json gives it 300"
    ):
        load(directory, added_tokens_decoder={"305": described("<a>")})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.model", r"has only tokenizer.model, which is not supported: save .* as"),
        ("tekken.json", r"has only tekken.json"),
        (None, r"tokenizer.json is missing; give a tokenizer with --tokenizer-path"),
    ],
)
def test_a_missing_tokenizer_is_named(tmp_path: Path, name: str | None, message: str) -> None:
    if name is not None:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_damaged_tokenizer_is_named(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text()[:-100])
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer.json"):
        load(directory)


def test_the_longest_text_of_some_tokens_is_bounded(directory: Path) -> None:
    tokenizer = load(directory)
    most = tokenizer.most_chars(10)
    assert most is not None
    for token_id in range(tokenizer.vocab_size):
        assert len(tokenizer.decode([token_id] * 10, skip_special_tokens=False)) <= most


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        (normalizers.NFC(), 4),
        (normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")]), 1),
        (normalizers.Replace("  ", " "), None),
        (normalizers.Strip(), None),
    ],
)
def test_normalizers_loosen_the_bound(
    normalizer: normalizers.Normalizer, factor: int | None
) -> None:
    plain, backend = Tokenizer(tiny_tokenizer(), {}), tiny_tokenizer()
    backend.normalizer = normalizer
    most, bare = Tokenizer(backend, {}).most_chars(10), plain.most_chars(10)
    assert bare is not None
    assert most == (None if factor is None else factor * bare)


def test_a_token_that_swallows_spaces_has_no_bound() -> None:
    backend = tiny_tokenizer()
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(backend, {}).most_chars(10) is None
