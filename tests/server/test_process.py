"""`python -m trunkline` as operators run it: real processes, a tiny random model."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.checkpoints import TinyCheckpoint
from tests.server.process import KEY, READY, Process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So large that a request of `LONG_TOKENS` takes seconds."""
    config = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16}
    return TinyCheckpoint(config=config).write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model: Path) -> Iterator[Process]:
    process = Process(model, "--api-key", KEY, "--shutdown-grace-s", "120")
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()


LONG_TOKENS = 400
LONG = {"text": "the", "sampling_params": {"max_new_tokens": LONG_TOKENS, "ignore_eos": True}}


def test_a_server_from_start_to_end(server: Process):
    text = "\n".join(server.lines)
    assert len(re.findall(r"server_args=ServerArgs\(", text)) == 1
    access = [line.partition('- "')[2] for line in server.lines if 'HTTP/1.1"' in line]
    assert access[:2] == ['GET /model_info HTTP/1.1" 200 OK', 'POST /generate HTTP/1.1" 200 OK']
    assert server.lines[-1].endswith(READY)
    fields = {"text": "the quick brown fox jumps", "sampling_params": {"temperature": 0}}
    first = server.http.post("/generate", json=fields).json()
    second = server.http.post("/generate", json=fields).json()
    assert first["output_ids"] == second["output_ids"]
    assert second["meta_info"]["cached_tokens"] == second["meta_info"]["prompt_tokens"] - 1
    messages = [{"role": "user", "content": "the fox"}]
    chat = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    whole = server.http.post("/v1/chat/completions", json=chat).json()
    with server.http.stream(
        "POST", "/v1/chat/completions", json={**chat, "stream": True}
    ) as response:
        frames = "".join(response.iter_text()).split("\n\n")[:-2]
    deltas = [json.loads(frame[6:])["choices"][0]["delta"] for frame in frames]
    joined = "".join(delta.get("content", "") for delta in deltas)
    assert joined == whole["choices"][0]["message"]["content"]
    info = server.http.get("/server_info")
    assert KEY not in info.text + text
    for process in (psutil.Process(server.process.pid), *server.children):
        assert KEY not in " ".join(process.cmdline())
    assert info.json()["context_len"] == 512
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


@pytest.mark.slow
def test_sigterm_lets_requests_end(server: Process):
    results: list[httpx.Response] = []
    whole = threading.Thread(
        target=lambda: results.append(httpx.post(
            f"{server.http.base_url}/generate", json=LONG, headers=server.http.headers, timeout=60
        ))
    )  # fmt: skip
    with server.http.stream("POST", "/generate", json={**LONG, "stream": True}) as response:
        chunks = response.iter_text()
        next(chunks)
        whole.start()
        while not re.search(r"engine_num_running_reqs{.*} 2.0", server.http.get("/metrics").text):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("Shutting down")
        health = httpx.get(f"{server.http.base_url}/health")
        late = httpx.post(
            f"{server.http.base_url}/generate", json=LONG, headers=server.http.headers
        )
        text = "".join(chunks)
    whole.join(60)
    assert (health.status_code, late.status_code) == (503, 503)
    assert text.endswith("data: [DONE]\n\n")
    assert results[0].json()["meta_info"]["completion_tokens"] == LONG_TOKENS
    assert server.end() == 0


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(model: Path, tmp_path: Path):
    server = Process(model, environment={"TMPDIR": str(tmp_path)})
    try:
        server.wait_for(READY)
        assert list(tmp_path.glob("trunkline-*"))
        with server.http.stream("POST", "/generate", json={**LONG, "stream": True}) as response:
            next(response.iter_text())
            server.process.send_signal(signal.SIGINT)
            server.wait_for("Shutting down")
            server.process.send_signal(signal.SIGINT)
            assert server.end(3) == 130
        assert not list(tmp_path.glob("trunkline-*"))
    finally:
        server.close()


@pytest.mark.slow
def test_a_signal_while_loading(model: Path):
    process = Process(model)
    try:
        process.wait_for("Started server process")
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
    finally:
        process.close()


@pytest.mark.slow
def test_health_is_503_until_the_model_is_there(model: Path):
    process = Process(model, environment={"TRUNKLINE_API_KEY": KEY})
    try:
        process.wait_for("Started server process")
        seen = set()
        while not any(READY in line for line in process.lines):
            try:
                seen.add(process.http.get("/health").status_code)
            except httpx.ConnectError:
                assert not seen, "it listened and stopped listening"
            assert process.process.poll() is None
            time.sleep(0.05)
        assert seen == {503}
        assert process.http.get("/health").status_code == 200
        assert httpx.get(f"{process.http.base_url}/v1/models").status_code == 401
        assert KEY not in "\n".join(process.lines)
    finally:
        process.close()


def test_a_stream_outlives_its_engine(server: Process):
    sampling = {**LONG["sampling_params"], "temperature": 0.8, "max_new_tokens": 100}
    body = {**LONG, "rid": "same", "sampling_params": sampling, "return_logprob": True}
    body |= {"logprob_start_len": 0, "top_logprobs_num": 2}
    whole = server.http.post("/generate", json=body).json()
    [engine] = server.children
    with server.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        for _ in range(10):
            first = json.loads(next(lines)[6:])
        engine.kill()
        last = [json.loads(line[6:]) for line in lines][-1]
    assert 0 < first["meta_info"]["completion_tokens"] < 100
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    for name in ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs"):
        assert last["meta_info"][name] == whole["meta_info"][name], name
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert server.http.post("/generate", json=body).json()["text"] == whole["text"]


@pytest.mark.slow
def test_a_model_that_is_not_there(tmp_path: Path):
    process = Process(tmp_path / "nothing")
    try:
        assert process.process.wait(60) == 1
        process._reader.join(5)
        assert "nothing" in process.lines[-1]
    finally:
        process.close()
