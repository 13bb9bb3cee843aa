"""A real server with the default model: what a fake engine cannot show."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from shutil import which
from typing import Any

import httpx
import pytest
from tests.server.process import Process

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
MAX_PREFILL_TOKENS = 64  # of `Process`


def post(server: Process, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return json.loads(response.content, parse_constant=lambda name: pytest.fail(name))


def frames(server: Process, path: str, **body: Any) -> list[Any]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def gauge(server: Process, name: str) -> float:
    text = server.http.get("/metrics").text
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def settle(server: Process, name: str, value: float, seconds: float = 2.0) -> None:
    """Wait until a gauge has a value."""
    deadline = time.monotonic() + seconds
    while gauge(server, name) != value:
        assert time.monotonic() < deadline, f"{name} is {gauge(server, name)}, not {value}"
        time.sleep(0.02)


def test_echoed_log_probs_line_up_with_the_text(default_server: Process) -> None:
    prompt = "\n1. Carol has 20"
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}
    answer = post(default_server, "/v1/completions", **fields)
    [choice], usage = answer["choices"], answer["usage"]
    logprobs, text = choice["logprobs"], choice["text"]
    assert text.startswith(prompt)
    count = usage["prompt_tokens"] + usage["completion_tokens"]
    assert {name: len(entries) for name, entries in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), count
    )
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"][0] == 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset:].startswith(token)


def test_prompt_log_probs_do_not_depend_on_cache_or_chunks(default_server: Process) -> None:
    words = "the quick brown fox jumps over the lazy dog and " * 20
    assert len(words.split()) > 3 * MAX_PREFILL_TOKENS
    fields = {"echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    first, second = (
        post(default_server, "/v1/completions", prompt=words, **fields)["choices"][0]["logprobs"]
        for _ in range(2)
    )
    assert first == second
    half = words[: len(words) // 2] + "sleeps instead."
    third = post(default_server, "/v1/completions", prompt=half, **fields)["choices"][0]["logprobs"]
    shared = len(half.split()) - 3
    assert third["token_logprobs"][:shared] == first["token_logprobs"][:shared]
    native = {"text": words, "return_logprob": True, "logprob_start_len": 0}
    metas = [post(default_server, "/generate", **native)["meta_info"] for _ in range(2)]
    for meta in metas:
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert metas[0]["input_token_logprobs"] == metas[1]["input_token_logprobs"]


def test_streams_join_to_the_whole_answer(default_server: Process) -> None:
    fields = {**QUESTION, "temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 3}
    whole = post(default_server, "/v1/chat/completions", **fields)
    [choice] = whole["choices"]
    chunks = frames(
        default_server, "/v1/chat/completions", **fields, stream_options={"include_usage": True}
    )
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"],
    }
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    joined = "".join(delta["delta"].get("content") or "" for delta in deltas)
    assert joined == choice["message"]["content"]
    entries = [
        entry for delta in deltas if delta.get("logprobs") for entry in delta["logprobs"]["content"]
    ]
    assert entries == choice["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    for entry in entries:
        best = entry["top_logprobs"]
        assert best[0]["token"] == entry["token"]
        assert best[0]["logprob"] >= best[1]["logprob"] >= best[2]["logprob"]
    assert len({json.dumps(entry["top_logprobs"]) for entry in entries}) > 1


@pytest.mark.parametrize(
    ("path", "prompt", "kinds"),
    [
        ("/v1/chat/completions", QUESTION, ("chat.completion", "chat.completion.chunk")),
        ("/v1/completions", {"prompt": "The capital"}, ("text_completion", "text_completion")),
    ],
)
def test_chunks_of_a_stream_belong_together(
    default_server: Process, path: str, prompt: dict[str, Any], kinds: tuple[str, str]
) -> None:
    fields = {**prompt, "max_tokens": 3, "ignore_eos": True, "temperature": 0, "n": 2}
    whole = post(default_server, path, **fields)
    assert whole["object"] == kinds[0]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2
    assert whole["usage"]["completion_tokens"] == 6
    chunks = frames(default_server, path, **fields)
    for key in ("id", "created", "model"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {kinds[1]}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        roles = [
            choice["delta"]["role"]
            for choice in choices
            if choice["index"] == index and "role" in choice.get("delta", {})
        ]
        assert roles == (["assistant"] if "messages" in prompt else [])


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 10.0**-power} for power in (3, 4, 5, 7, 12)]
    + [{"temperature": 1, "top_p": 1e-6}],
)
def test_almost_greedy_is_greedy(default_server: Process, sampling: dict[str, float]) -> None:
    fields = {"prompt": "The capital of France is", "max_tokens": 10}
    greedy = post(default_server, "/v1/completions", **fields, temperature=0)
    almost = post(default_server, "/v1/completions", **fields, **sampling)
    assert almost["choices"][0]["text"] == greedy["choices"][0]["text"]


def test_penalties_end_a_loop(default_server: Process) -> None:
    fields = {"prompt": "la la la la la la", "max_tokens": 40, "temperature": 0}
    plain, zero, *penalised = (
        post(default_server, "/v1/completions", **fields, **extra)["choices"][0]["text"]
        for extra in (
            {},
            {"frequency_penalty": 0, "presence_penalty": 0},
            {"frequency_penalty": 2},
            {"presence_penalty": 2},
        )
    )
    assert plain == zero
    most = max(plain.split(), key=plain.split().count)
    for text in penalised:
        assert text.split().count(most) < plain.split().count(most)


def test_every_key_of_meta_info_is_in_every_chunk(default_server: Process) -> None:
    fields = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 4}}
    chunks = frames(default_server, "/generate", **fields)
    whole = post(default_server, "/generate", **fields)
    assert 1 <= len(chunks) <= 4  # a slow reader gets updates merged
    for chunk in chunks:
        assert list(chunk["meta_info"]) == list(whole["meta_info"])
        assert chunk["meta_info"]["num_retractions"] == 0


def test_the_default_model_has_a_name(default_server: Process) -> None:
    name = "SmolLM2-135M-Instruct"
    info = default_server.http.get("/server_info").json()
    facts = default_server.http.get("/model_info").json()
    [model] = default_server.http.get("/v1/models").json()["data"]
    shown = (model["id"], model["root"], facts["model_path"], info["model_path"])
    assert set(shown) == {name}
    assert any(f"Load weight begin. model={name}" in line for line in default_server.lines)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_who_leaves_holds_nothing(default_server: Process, path: str) -> None:
    long: dict[str, Any] = {**QUESTION, "max_tokens": 2000, "ignore_eos": True}
    if path == "/generate":
        sampling = {"max_new_tokens": 2000, "ignore_eos": True}
        long = {"text": "Once", "sampling_params": sampling}
    url = f"{default_server.http.base_url}{path}"
    aborted = gauge(default_server, "engine_num_aborted_requests_total")
    with httpx.stream("POST", url, json={**long, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
    settle(default_server, "engine_num_running_reqs", 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=long, timeout=1)
    settle(default_server, "engine_num_running_reqs", 0)
    settle(default_server, "engine_num_used_tokens", 0)
    post(default_server, "/generate", text="Hi", sampling_params={"max_new_tokens": 1})
    assert gauge(default_server, "engine_num_aborted_requests_total") == aborted + 2


@pytest.mark.slow
def test_probes_never_wait_behind_prompts(default_server: Process) -> None:
    """Prompts near the limit of the context, all at once."""
    url = str(default_server.http.base_url)
    long = {"text": "word " * 480, "sampling_params": {"max_new_tokens": 1}}

    def ask(index: int) -> None:
        try:
            httpx.post(
                f"{url}/generate", json={**long, "text": f"{index} {long['text']}"}, timeout=8
            )
        except httpx.ReadTimeout:
            pass  # leaving is enough

    clients = [threading.Thread(target=ask, args=(index,)) for index in range(32)]
    for client in clients:
        client.start()
    times = []
    while any(client.is_alive() for client in clients):
        began = time.monotonic()
        assert httpx.get(f"{url}/health", timeout=1).status_code == 200
        times.append(time.monotonic() - began)
        time.sleep(0.2)
    for client in clients:
        client.join()
    assert len(times) > 10
    settle(default_server, "engine_num_queue_reqs", 0, seconds=20)
    settle(default_server, "engine_num_running_reqs", 0, seconds=20)


@pytest.mark.skipif(which("promtool") is None, reason="promtool is not installed")
def test_metrics_pass_promtool(default_server: Process) -> None:
    text = default_server.http.get("/metrics").content
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")
