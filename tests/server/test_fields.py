"""Fields that chat and completions share with other engines: each honoured, refused or named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.server.fake_engine import EOS
from tests.server.live import Live
from tests.server.sse import events, texts

from trunkline.engine import native_request, validation
from trunkline.server.config import ServerConfig
from trunkline.server.openai import chat, completions
from trunkline.server.openai import fields as shared

HELLO = [*b"Hello world", EOS]
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
    GENERATE: {"text": "hi"},
}


def refused(live: Live, path: str, **fields: Any) -> dict[str, Any]:
    for stream in (False, True):
        response = live.post(path, {**BASES[path], **fields, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    return error


def test_token_ids_of_a_chat(live: Live):
    body = live.chat(return_token_ids=True, n=2).json()
    prompt = list(b"<user>hi\n<assistant>")
    assert body["prompt_token_ids"] == prompt
    for choice in body["choices"]:
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == choice["response_token_ids"] == HELLO
    chunks = events(live.chat(return_token_ids=True, stream=True, stop="lo wo"))
    first, *others = chunks
    assert first["prompt_token_ids"] == first["choices"][0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in {*chunk, *chunk["choices"][0]} for chunk in others)
    ids = [one for chunk in others for one in chunk["choices"][0].get("token_ids", [])]
    assert ids == [*b"Hello wo"]  # also those whose text was held back and cut
    assert texts(chunks) == {0: "Hel"}


def test_token_ids_of_completions(live: Live):
    for echo in (False, True):
        body = live.completion(["ab", "c"], return_token_ids=True, echo=echo).json()
        assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[97, 98], [99]]
        assert [choice["token_ids"] for choice in body["choices"]] == [HELLO, HELLO]
        assert "prompt_token_ids" not in body
        chunks = events(live.completion("ab", return_token_ids=True, echo=echo, stream=True))
        assert chunks[0]["choices"][0]["prompt_token_ids"] == [97, 98]
        assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in chunks[1:])


def test_token_ids_of_the_prompt_alone(live: Live):
    for path in (CHAT, COMPLETION):
        [choice] = live.post(path, {**BASES[path], "return_prompt_token_ids": True}).json()[
            "choices"
        ]
        assert choice["prompt_token_ids"]
        assert "token_ids" not in choice
        assert "prompt_token_ids" not in live.post(path, BASES[path]).json()["choices"][0]


def test_a_chat_of_token_ids(live: Live):
    body = live.post(CHAT, {"input_ids": [7, 8, 9]})
    assert body.json()["usage"]["prompt_tokens"] == 3
    assert live.engine.submitted[-1].prompt == [7, 8, 9]
    assert "x-ignored-fields" not in body.headers
    with_messages = live.chat(input_ids=[7], reasoning_effort="low")
    assert with_messages.headers["x-ignored-fields"] == "messages, reasoning_effort"
    for ids in ([], [300], [True], "x", [[1]]):
        assert refused(live, CHAT, input_ids=ids)["param"] == "input_ids"
    assert live.post(CHAT, {}).json()["error"]["param"] == "messages"


DOCUMENTS = "{% for one in documents or [] %}[{{ one.text }}]{% endfor %}{{ messages[0].content }}"


def test_documents_need_a_template_that_reads_them(live: Live):
    documents = [{"title": "a", "text": "one"}, {"text": "two"}]
    with Live(template=DOCUMENTS) as other:
        assert other.chat(documents=documents).status_code == 200
        assert bytes(other.engine.submitted[-1].prompt) == b"[one][two]hi"
    assert refused(live, CHAT, documents=documents)["param"] == "documents"
    assert live.chat(documents=[]).status_code == 200


def test_template_variables_that_nothing_reads_are_named(live: Live):
    response = live.chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert response.headers["x-ignored-fields"] == (
        "chat_template_kwargs.enable_thinking, reasoning_effort"
    )
    with Live(template="{{ reasoning_effort }}{{ mood }}{{ messages[0].content }}") as other:
        response = other.chat(chat_template_kwargs={"mood": "gay"}, reasoning_effort="low")
        assert "x-ignored-fields" not in response.headers
        assert bytes(other.engine.submitted[-1].prompt) == b"lowgayhi"


def test_strict_servers_refuse_what_others_ignore():
    config = ServerConfig()
    strict = replace(config, api=replace(config.api, strict_fields=True))
    with Live(config=strict) as live:
        assert refused(live, CHAT, banana=1)["param"] == "banana"
        assert refused(live, COMPLETION, banana=None)["param"] == "banana"
        assert refused(live, GENERATE, top_logprobs_num=2)["param"] == "top_logprobs_num"
        error = refused(live, CHAT, reasoning_effort="low")
        assert error["param"] == "reasoning_effort"
        assert "--strict-fields" in error["message"]
        assert live.chat(user="me", metadata={}, store=True).status_code == 200
        assert live.generate(text="a", logprob_start_len=-1).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_best_of_is_n(live: Live, path: str):
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None, "n": 2}):
        assert live.post(path, {**BASES[path], **fields}).status_code == 200
    for fields in ({"best_of": 2}, {"best_of": 1, "n": 2}, {"best_of": True}, {"best_of": "1"}):
        assert refused(live, path, **fields)["param"] == "best_of"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_tier_is_echoed_where_one_was_asked_for(live: Live, path: str):
    for stream in (False, True):
        asked = {**BASES[path], "service_tier": "auto", "stream": stream}
        response = live.post(path, asked)
        answers = events(response) if stream else [response.json()]
        assert {one["service_tier"] for one in answers} == {"default"}
    assert "service_tier" not in live.post(path, BASES[path]).json()


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_fingerprint_is_the_same_everywhere(live: Live, path: str):
    marks = {live.post(one, BASES[one]).json()["system_fingerprint"] for one in (CHAT, path)}
    chunks = events(live.post(path, {**BASES[path], "stream": True}))
    assert marks | {chunk["system_fingerprint"] for chunk in chunks} == marks
    assert len(marks) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_other_names_of_fields(live: Live, path: str):
    body = {**BASES[path], "stop": "lo", "include_stop_str_in_output": True}
    [choice] = live.post(path, body).json()["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == "Hello"
    live.post(path, {**BASES[path], "max_tokens": 5, "max_completion_tokens": 3})
    assert live.engine.submitted[-1].sampling.max_new_tokens == 3
    contradiction = {"include_stop_str_in_output": True, "no_stop_trim": False}
    assert refused(live, path, **contradiction)["param"] == "include_stop_str_in_output"


@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("prompt_logprobs", None, 0),
        ("return_hidden_states", False, True),
        ("return_meta_info", False, True),
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 0.5),
        ("bad_words", [], ["x"]),
        ("allowed_token_ids", None, [1]),
        ("truncate_prompt_tokens", None, 5),
        ("custom_params", {}, {"a": 1}),
        ("session_params", {}, {"id": "x"}),
        ("lora_path", None, "x"),
    ],
)
def test_what_is_known_and_not_supported(live: Live, field: str, neutral: Any, other: Any):
    for path in (CHAT, COMPLETION):
        response = live.post(path, {**BASES[path], field: neutral})
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
        error = refused(live, path, **{field: other})
        assert error["param"] == field
        assert "not supported" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "chat_template", "{{ messages }}"),
        (CHAT, "add_special_tokens", True),
        (CHAT, "echo", True),
        (COMPLETION, "suffix", "x"),
        (COMPLETION, "add_special_tokens", False),
    ],
)
def test_what_one_endpoint_alone_knows(live: Live, path: str, field: str, value: Any):
    error = refused(live, path, **{field: value})
    assert error["param"] == field
    assert "not supported" in error["message"]


def test_stop_patterns_reach_the_engine(live: Live):
    patterns = ["a+b", r"\d"]
    live.chat(stop_regex=patterns)
    assert live.engine.submitted[-1].sampling.stop_regex == patterns
    live.completion(stop_regex="x")
    assert live.engine.submitted[-1].sampling.stop_regex == ["x"]
    live.generate(text="hi", sampling_params={"stop_regex": ["y"]})
    assert live.engine.submitted[-1].sampling.stop_regex == ["y"]
    for bad in ([""], "", ["a"] * 33, "a" * 257, [1], {"a": 1}, ["a" * 250] * 5):
        assert refused(live, CHAT, stop_regex=bad)["param"] == "stop_regex"


def test_processed_log_probs_are_a_choice_of_the_server(live: Live):
    live.chat(logprobs=True)
    assert live.engine.submitted[-1].logprobs is not None
    assert not live.engine.submitted[-1].logprobs.processed
    config = ServerConfig()
    engine = replace(
        config.engine, scheduler=replace(config.engine.scheduler, logprobs_mode="processed")
    )
    with Live(config=replace(config, engine=engine)) as other:
        other.chat(logprobs=True)
        other.completion(logprobs=1)
        other.generate(text="a", return_logprob=True)
        assert [one.logprobs.processed for one in other.engine.submitted if one.logprobs] == [
            True
        ] * 3


@pytest.mark.parametrize("path", [COMPLETION, GENERATE])
def test_samples_are_bounded_over_all_prompts(live: Live, path: str):
    many = ["a"] * 100
    if path == COMPLETION:
        error = refused(live, path, prompt=many, n=100)
    else:
        error = refused(live, path, text=many, sampling_params={"n": 100})
    assert error["param"] == "n"
    assert "10000 samples, the limit is 2048" in error["message"]


def test_unknown_sampling_parameters_are_refused_and_unknown_fields_named(live: Live):
    error = refused(live, GENERATE, sampling_params={"banana": 1})
    assert (error["param"], error["message"]) == ("banana", "unknown sampling parameter 'banana'.")
    assert live.generate(text="a", banana=1).headers["x-ignored-fields"] == "banana"
    both = {"text": "a", "input_ids": [1]}
    assert "got both" in refused(live, GENERATE, **both)["message"]


def test_every_field_is_documented():
    page = Path(__file__).parents[2].joinpath("docs/api.md").read_text("utf-8")
    page = page.replace("guided_*", "guided_json guided_regex guided_choice guided_grammar")
    page = page.replace("`bootstrap_*`", "bootstrap_host bootstrap_port bootstrap_room")
    words = set(re.findall(r"\w+", page))
    names = {
        *native_request.BOOKKEEPING,
        *native_request.SUPPORTED,
        *native_request.UNSUPPORTED,
        *validation.SAMPLING_NAMES,
        *validation.UNSUPPORTED,
        *shared.BOOKKEEPING,
        *shared.UNSUPPORTED,
        *chat.ChatFields.__struct_fields__,
        *chat.UNSUPPORTED,
        *completions.CompletionFields.__struct_fields__,
        *completions.UNSUPPORTED,
    }
    assert names - words == set()
