"""What users of other engines reported, where no other file has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.live import Live
from tests.server.process import READY, Process

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = {"messages": [{"role": "user", "content": "hi"}]}
POOL_TOKENS = 512


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/responses", "/v1/messages"])
def test_an_unknown_model_is_a_404_with_and_without_stream(
    live: Live, path: str, stream: bool
) -> None:
    prompts = {COMPLETION: {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}
    body = {**prompts.get(path, HI), "model": "other", "max_tokens": 4, "stream": stream}
    if path == "/v1/responses":
        del body["max_tokens"]
    response = live.post(path, body)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"
    assert "other" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("interval", [1, 4])
def test_usage_is_in_the_last_event_before_the_end_alone(
    live: Live, path: str, interval: int
) -> None:
    body = {**(HI if path == CHAT else {"prompt": "hi"}), "max_tokens": 8}
    whole = live.post(path, body).json()["usage"]
    streamed = {**body, "stream": True, "stream_interval": interval}
    text = live.post(path, {**streamed, "stream_options": {"include_usage": True}}).text
    *payloads, last, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    final = json.loads(last.removeprefix("data: "))
    assert (final["choices"], final["usage"]) == ([], whole)
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    chunks = [json.loads(payload.removeprefix("data: ")) for payload in payloads]
    assert all(chunk.get("usage") is None for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_no_stops_are_no_stops(live: Live) -> None:
    plain = live.chat().json()["choices"]
    for stop in ([], None):
        assert live.chat(stop=stop).json()["choices"] == plain
        assert live.chat(logit_bias={}, stop=stop).json()["choices"] == plain


def test_what_a_template_raises_shows_no_stack_and_no_path(live: Live) -> None:
    response = live.chat("refuse me")
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("roles must alternate")
    for word in ("Traceback", ".py", "jinja", "/"):
        assert word not in response.text.replace("application/json", ""), word


@pytest.fixture(scope="module")
def small_pool() -> Iterator[Process]:
    """A pool that is smaller than the context."""
    sizes = ("--context-length", "2048", "--max-total-tokens", str(POOL_TOKENS))
    process = Process(None, *sizes)
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()


def post(server: Process, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", [GENERATE, COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_pool_cannot_hold_is_refused_at_once(
    small_pool: Process, path: str, stream: bool
) -> None:
    long = "word " * 600
    bodies: dict[str, dict[str, Any]] = {
        GENERATE: {"text": long},
        COMPLETION: {"prompt": long},
        CHAT: {"messages": [{"role": "user", "content": long}]},
    }
    response = small_pool.http.post(path, json={**bodies[path], "stream": stream})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    message = response.json()["error"]["message"]
    numbers = [
        int(word) for word in message.replace(",", "").replace(".", " ").split() if word.isdigit()
    ]
    assert any(number >= 600 for number in numbers), message
    assert any(POOL_TOKENS - 32 <= number <= POOL_TOKENS for number in numbers), message
    post(small_pool, COMPLETION, prompt="one two three", max_tokens=2)
    assert small_pool.http.get("/health").status_code == 200


def test_an_answer_that_fills_the_pool_ends_by_its_length(small_pool: Process) -> None:
    prompt = "word " * (POOL_TOKENS - 60)
    answer = post(small_pool, COMPLETION, prompt=prompt, max_tokens=1000, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] <= 64


def test_a_bias_makes_any_id_the_first_token(small_pool: Process) -> None:
    for chosen in (28, 5000):
        fields = {"temperature": 0, "max_tokens": 1, "return_token_ids": True}
        answer = post(small_pool, CHAT, **HI, **fields, logit_bias={str(chosen): 100})
        assert answer["choices"][0]["token_ids"] == [chosen]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
    ],
)
def test_unusual_turns_are_answered_where_the_template_takes_them(
    small_pool: Process, messages: list[dict[str, str]]
) -> None:
    assert post(small_pool, CHAT, messages=messages, max_tokens=1)["usage"]["prompt_tokens"] > 0


def test_a_result_without_a_call_is_named(small_pool: Process) -> None:
    result = {"role": "tool", "tool_call_id": "call_none", "content": "3"}
    body = {"messages": [*HI["messages"], result], "max_tokens": 1}
    response = small_pool.http.post(CHAT, json=body)
    assert response.status_code == 400
    assert "call_none" in response.json()["error"]["message"]


@pytest.mark.parametrize("interval", [1, 4])
def test_log_probs_stay_with_parsers_on(small_pool: Process, interval: int) -> None:
    """Tools are given and not used: one entry per token, whole and streamed alike."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    fields: dict[str, Any] = {
        **{**HI, "tools": [tool], "tool_choice": "none", "logprobs": True, "top_logprobs": 3},
        **{"temperature": 0, "max_tokens": 12, "stream_interval": interval},
    }
    whole = post(small_pool, CHAT, **fields)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    for entry in entries:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    text = small_pool.http.post(CHAT, json={**fields, "stream": True}).text
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in text.split("\n\n")[:-2]]
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == entries
