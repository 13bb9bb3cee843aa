"""What begins and what ends a sample, through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import TinyCheckpoint, write_json
from transformers import AutoTokenizer

from trunkline import Engine
from trunkline.engine.client import RequestRefused

ENDS = (50, 60)  # in generation_config.json
TOKENIZER_END = 2  # </s>
BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = TinyCheckpoint(chat_template=BOS_TEMPLATE).write(tmp_path_factory.mktemp("ends"))
    sampling = {"temperature": 0.01, "top_k": 5}
    write_json(path / "generation_config.json", {"eos_token_id": [*ENDS], **sampling})
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    settings: dict[str, Any] = {"max_total_tokens": 4096, "max_prefill_tokens": 64}
    with Engine(str(directory), dtype="float32", log_level="error", **settings) as started:
        yield started


def forced(engine: Engine, token: int, **sampling: Any) -> Any:
    params = {"temperature": 0, "logit_bias": {str(token): 100}, **sampling}
    return engine.generate(input_ids=[7, 8, 9], sampling_params=params)


@pytest.mark.parametrize("end", [*ENDS, TOKENIZER_END])
def test_every_end_token_ends(engine: Engine, end: int) -> None:
    output = forced(engine, end, max_new_tokens=32)
    assert output["output_ids"] == [end]
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert output["text"] == ""


@pytest.mark.parametrize("end", [*ENDS, TOKENIZER_END])
def test_end_tokens_wait_for_min_new_tokens(engine: Engine, end: int) -> None:
    output = forced(engine, end, min_new_tokens=4, max_new_tokens=32)
    assert len(output["output_ids"]) == 5
    assert not set(output["output_ids"][:4]) & {*ENDS, TOKENIZER_END}
    assert output["output_ids"][4] == end
    assert output["meta_info"]["completion_tokens"] == 5


@pytest.mark.parametrize("end", [*ENDS, TOKENIZER_END])
def test_end_tokens_can_be_ignored(engine: Engine, end: int) -> None:
    output = forced(engine, end, ignore_eos=True, max_new_tokens=20)
    assert output["output_ids"] == [end] * 20
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


def test_a_bias_chooses_the_first_token(engine: Engine) -> None:
    assert forced(engine, 123, max_new_tokens=1)["output_ids"] == [123]


def test_recommended_sampling_is_not_native_sampling(engine: Engine) -> None:
    """The native API samples at temperature 1 whatever the checkpoint recommends."""
    params = {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 3}
    plain = engine.generate("the", params)
    explicit = engine.generate("the", {**params, "temperature": 1.0, "top_k": -1})
    assert plain["output_ids"] == explicit["output_ids"]


def test_a_chat_has_one_bos(engine: Engine, directory: Path) -> None:
    reference = AutoTokenizer.from_pretrained(directory)
    expected = reference.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert expected.count(reference.bos_token_id) == 1
    params = {"temperature": 0, "max_new_tokens": 2}
    chat = engine.chat(MESSAGES, params)
    assert chat["meta_info"]["prompt_tokens"] == len(expected)
    by_ids = engine.generate(input_ids=expected, sampling_params=params)
    assert chat["output_ids"] == by_ids["output_ids"]


def test_text_has_what_the_tokenizer_adds(engine: Engine, directory: Path) -> None:
    """Raw text gets the tokenizer's own BOS, also when it begins with one already."""
    reference = AutoTokenizer.from_pretrained(directory)
    for text in ("the quick fox", "<s>the quick fox"):
        output = engine.generate(text, {"max_new_tokens": 1})
        assert output["meta_info"]["prompt_tokens"] == len(reference.encode(text))


@pytest.mark.parametrize("trimmed", [True, False])
def test_a_pattern_stops_where_it_is_complete(engine: Engine, trimmed: bool) -> None:
    """The pattern is taken from the text itself, across and inside tokens."""
    params = {"temperature": 0.8, "max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 5}
    whole = engine.generate("the quick fox", params)["text"]
    for start in range(8, len(whole) - 4, 5):
        piece = whole[start : start + 3]
        if not piece.isalnum() or not piece.isascii():
            continue
        pattern = f"{piece[0]}[{piece[1]}]{piece[2]}+"
        chosen = {**params, "stop_regex": [r"\d{60}", pattern], "no_stop_trim": not trimmed}
        output = engine.generate("the quick fox", chosen)
        first = whole.index(piece)
        assert output["text"] == whole[: first if trimmed else first + 3]
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
        seen = ""
        for chunk in engine.generate("the quick fox", chosen, stream=True):
            assert chunk["text"].startswith(seen)
            seen = chunk["text"]
        assert seen == output["text"]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("([", "unclosed character class"),
        ("*a", "repetition operator missing expression"),
        ("a*", "matches the empty text"),
        (r"a\b", "assertions"),
        (r"(?=a)b", "look-around"),
        (r"\w{1000}", "limit of 262144 bytes"),
    ],
)
def test_bad_patterns_are_refused(engine: Engine, pattern: str, words: str) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        engine.generate("x", {"stop_regex": pattern})
    assert (caught.value.status, caught.value.param) == (400, "stop_regex")
    assert engine.generate("x", {"max_new_tokens": 1})["output_ids"]


def test_patterns_wait_for_min_new_tokens(engine: Engine) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True, "stop_regex": "(?s).", "sampling_seed": 1}
    for least in (0, 1, 5):
        output = engine.generate("the", {**params, "min_new_tokens": least})
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": "(?s)."}
        assert max(least, 1) <= output["meta_info"]["completion_tokens"] <= least + 5


def test_a_nul_character_is_a_pattern_like_any_other(engine: Engine) -> None:
    assert engine.generate("x", {"max_new_tokens": 2, "stop_regex": "\0"})["output_ids"]


@pytest.mark.parametrize("interval", [1, 2, 7])
def test_streamed_characters_are_whole(engine: Engine, interval: int) -> None:
    """Hot samples are full of broken characters; what is sent is never taken back."""
    params = {"temperature": 3.0, "max_new_tokens": 80, "ignore_eos": True}
    for seed in range(2):
        chosen = {**params, "sampling_seed": seed, "stream_interval": interval}
        whole = engine.generate("é漢字 👨‍👩‍👧‍👦", chosen)
        assert whole["text"] == engine.tokenizer.decode(whole["output_ids"])
        seen = ""
        for chunk in engine.generate("é漢字 👨‍👩‍👧‍👦", chosen, stream=True):
            assert chunk["text"].startswith(seen)
            seen = chunk["text"]
        assert seen == whole["text"]
