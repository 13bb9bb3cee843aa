"""Stops and log-probs that other engines got wrong, tried on the default model."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.server.process import Process

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
STORY = {
    "messages": [{"role": "user", "content": "Tell me about the history of Rome."}],
    "temperature": 0,
    "max_tokens": 48,
}


def post(server: Process, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return json.loads(response.content, parse_constant=lambda name: pytest.fail(name))


def deltas(server: Process, **body: Any) -> tuple[list[str], dict[str, Any]]:
    """The pieces of a streamed chat, and its last choice."""
    text = server.http.post(CHAT, json={**body, "stream": True}).text
    payloads = [frame.removeprefix("data: ") for frame in text.split("\n\n")[:-1]]
    assert payloads.pop() == "[DONE]"
    choices = [json.loads(payload)["choices"][0] for payload in payloads]
    return [one["delta"].get("content") or "" for one in choices], choices[-1]


@pytest.fixture(scope="module")
def tokens(default_server: Process) -> list[str]:
    """The tokens of the greedy story; all are whole characters."""
    [choice] = post(default_server, CHAT, **STORY, logprobs=True)["choices"]
    entries = choice["logprobs"]["content"]
    texts = [entry["token"] for entry in entries if not entry["token"].startswith("<|")]
    assert "".join(texts) == choice["message"]["content"]
    return texts


def slices(tokens: list[str]) -> list[str]:
    """Inside a token; the seam of two; more than a token's length over several."""
    text = "".join(tokens)
    long = next(token for token in tokens[8:] if len(token) > 5)
    at = next(n for n in range(10, len(tokens)) if min(map(len, tokens[n : n + 2])) > 2)
    seam = tokens[at][-2:] + tokens[at + 1][:2]
    start = len("".join(tokens[:6])) + 1
    return [long[2:4], seam, text[start : start + 11]]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("as_pattern", [False, True])
def test_stops_cut_where_they_begin_and_never_leak(
    default_server: Process, tokens: list[str], which: int, as_pattern: bool
) -> None:
    stop, text = slices(tokens)[which], "".join(tokens)
    pattern = "".join(f"[{char}]" for char in stop)
    fields: dict[str, Any] = {"stop_regex": pattern} if as_pattern else {"stop": ["never", stop]}
    whole = post(default_server, CHAT, **STORY, **fields)
    [choice] = whole["choices"]
    expected = text[: text.index(stop)]
    assert choice["message"]["content"] == expected
    assert (choice["finish_reason"], choice["matched_stop"]) == (
        "stop",
        pattern if as_pattern else stop,
    )
    seen = len(expected + stop)
    counts = [len("".join(tokens[:count])) for count in range(len(tokens) + 1)]
    assert whole["usage"]["completion_tokens"] == next(n for n, c in enumerate(counts) if c >= seen)
    pieces, last = deltas(default_server, **STORY, **fields)
    assert "".join(pieces) == expected
    assert last["finish_reason"] == "stop"


def test_log_probs_are_finite_and_strict_json(default_server: Process) -> None:
    fields = {"prompt": "hi", "logprobs": 5, "top_k": 1, "max_tokens": 4}
    logprobs = post(default_server, COMPLETION, **fields)["choices"][0]["logprobs"]
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"])
    assert all(0 < len(best) <= 5 for best in logprobs["top_logprobs"])
    for token, best in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in best  # the sampled one, which top_k makes the best


@pytest.mark.parametrize("bias", [-100, 100])
def test_a_bias_moves_tokens_and_not_log_probs(default_server: Process, bias: int) -> None:
    """Log-probs are the model's own: the banned token still leads the alternatives."""
    plain = {**STORY, "logprobs": True, "top_logprobs": 5, "max_tokens": 1}
    [first] = post(default_server, CHAT, **plain)["choices"][0]["logprobs"]["content"]
    [best] = post(default_server, "/tokenize", prompt=first["token"], add_special_tokens=False)[
        "tokens"
    ]
    biased = {**plain, "logit_bias": {str(best): bias}}
    [entry] = post(default_server, CHAT, **biased)["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == first["top_logprobs"]
    assert (entry["token"] == first["token"]) == (bias > 0)
    assert math.isfinite(entry["logprob"])


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("path", ["/generate", CHAT, COMPLETION])
def test_no_token_and_one(default_server: Process, path: str, length: int) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "one", "sampling_params": {"max_new_tokens": length}},
        CHAT: {**STORY, "max_tokens": length},
        COMPLETION: {"prompt": "one", "max_tokens": length, "echo": True, "logprobs": 1},
    }
    answer = post(default_server, path, **bodies[path])
    if path == "/generate":
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == len(answer["output_ids"]) == length
        assert meta["finish_reason"] == {"type": "length", "length": length}
    else:
        assert answer["usage"]["completion_tokens"] == length
        assert answer["choices"][0]["finish_reason"] == "length"
    if path == COMPLETION and length == 0:
        assert answer["choices"][0]["text"] == "one"
    text = default_server.http.post(path, json={**bodies[path], "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")


def test_the_last_ids_of_the_vocabulary_are_ids(default_server: Process) -> None:
    size = default_server.http.post(COMPLETION, json={"prompt": [10**8], "max_tokens": 1})
    assert size.status_code == 400
    last = int(size.json()["error"]["message"].partition("[0, ")[2].partition(")")[0]) - 1
    for ids in ([0], [last], [0, last]):
        assert post(default_server, COMPLETION, prompt=ids, max_tokens=1)["usage"][
            "prompt_tokens"
        ] == len(ids)


@pytest.mark.parametrize("pattern", ["([", "*a", "a*", "x$", r"(?=a)b", r"\w{1000}"])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_patterns_are_refused_before_a_stream(
    default_server: Process, pattern: str, stream: bool
) -> None:
    body = {**STORY, "stop_regex": ["fine", pattern], "stream": stream}
    response = default_server.http.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["param"] == "stop_regex"
    assert "stop pattern" in error["message"]
    assert default_server.http.get("/health").status_code == 200
