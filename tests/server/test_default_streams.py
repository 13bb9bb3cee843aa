"""Streams equal whole answers with the default model, over a few requests that use many options."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.joined import joined_native, joined_openai, timeless
from tests.server.process import Process

HOT = {"temperature": 0.9, "max_tokens": 24, "rid": "r"}
CHATS: list[dict[str, Any]] = [
    {**HOT, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {**HOT, "stop_regex": r"\s(?i:the|a)\s", "stream_interval": 3},
    {**HOT, "stop": ["e ", "."], "stop_regex": ["z+"], "no_stop_trim": True, "min_tokens": 5},
    {**HOT, "frequency_penalty": 1, "logit_bias": {"30": 5}, "ignore_eos": True, "top_p": 0.9},
]
COMPLETIONS: list[dict[str, Any]] = [
    {**HOT, "prompt": ["one two", "é漢字"], "n": 2, "echo": True, "logprobs": 1},
    {**HOT, "prompt": [[504, 28], [30]], "stop_regex": r"[aeiou]{2}", "return_token_ids": True},
    {**HOT, "prompt": "1, 2, 3,", "max_tokens": 0, "echo": True, "logprobs": 0},
]
NATIVE: list[dict[str, Any]] = [
    {
        "text": ["one two three", "é漢字"],
        "return_logprob": True,
        "logprob_start_len": [1, 0],
        "top_logprobs_num": 2,
        "token_ids_logprob": [1, 5],
        "return_text_in_logprobs": True,
    },
    {"input_ids": [504, 28], "return_prompt_token_ids": True},
]


def ask(server: Process, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    whole = server.http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    streamed = {**body, "stream": True}
    if path != "/generate":
        streamed["stream_options"] = {"include_usage": True}
    text = server.http.post(path, json=streamed).text
    payloads = [frame.removeprefix("data: ") for frame in text.split("\n\n")[:-1]]
    assert payloads.pop() == "[DONE]"
    return whole.json(), [json.loads(payload) for payload in payloads]


@pytest.mark.parametrize("fields", CHATS)
def test_chat(default_server: Process, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me of Rome."}], **fields}
    whole, chunks = ask(default_server, "/v1/chat/completions", body)
    assert timeless(joined_openai(chunks), cache=False) == timeless(whole, cache=False)


@pytest.mark.parametrize("fields", COMPLETIONS)
def test_completions(default_server: Process, fields: dict[str, Any]) -> None:
    whole, chunks = ask(default_server, "/v1/completions", fields)
    assert timeless(joined_openai(chunks), cache=False) == timeless(whole, cache=False)


@pytest.mark.parametrize("fields", NATIVE)
def test_generate(default_server: Process, fields: dict[str, Any]) -> None:
    sampling = {"temperature": 0.9, "max_new_tokens": 20, "stop_regex": "q|zz", "n": 2}
    body = {"rid": "r", "sampling_params": sampling, **fields}
    whole, chunks = ask(default_server, "/generate", body)
    assert timeless(joined_native(chunks), cache=False) == timeless(whole, cache=False)


def test_the_log_prob_at_the_boundary_is_there(default_server: Process) -> None:
    """Scoring from a position on gives the values of scoring from 0, the first one too."""
    body: dict[str, Any] = {"text": "The capital of France is Paris, and", "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 0}
    answers = [
        default_server.http.post("/generate", json={**body, "logprob_start_len": start}).json()
        for start in (0, 3, 5, 0)
    ]
    values = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    assert values[0][0][0] is None
    assert values[1] == values[0][3:]
    assert values[2] == values[0][5:]
    assert values[3] == values[0]
    assert all(value < 0 for value, _, _ in values[1])
