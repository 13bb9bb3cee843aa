"""Whoever goes away stops costing: at every stage, for streams and whole answers."""

import json
import socket
import time
from collections.abc import Callable

import pytest
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live

PATHS = {
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 400,
        "ignore_eos": True,
    },
    "/v1/responses": {"input": "x", "max_output_tokens": 400, "ignore_eos": True},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 400,
        "ignore_eos": True,
    },
    "/v1/completions": {"prompt": ["x", "y"], "n": 2, "max_tokens": 400, "ignore_eos": True},
}


def wait_until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def metric(live: Live, name: str) -> float:
    lines = live.http.get("/metrics").text.splitlines()
    values = [line.rpartition(" ")[2] for line in lines if line.startswith(name)]
    return sum(float(value) for value in values)


def send(live: Live, path: str, stream: bool) -> socket.socket:
    body = json.dumps({**PATHS[path], "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=5)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stage", ["stream", "whole", "queued stream", "queued whole"])
def test_leaving_aborts(path: str, stage: str):
    engine = FakeEngine(delay_s=0.02, hold="queued" in stage)
    with Live(engine) as live:
        requests = 2 if path == "/v1/completions" else 1
        connection = send(live, path, "stream" in stage)
        if stage == "stream":
            read = b""
            while read.count(b"data: ") < 5:
                read += connection.recv(4096)
        wait_until(lambda: len(engine.submitted) == requests)
        wait_until(lambda: live.server.in_flight == 1)
        connection.close()
        wait_until(lambda: len(engine.aborted) == requests and not engine.running)
        wait_until(lambda: live.server.in_flight == 0)
        assert metric(live, "engine_num_aborted_requests_total") == requests
        assert metric(live, "engine_num_running_reqs") == 0
        assert metric(live, "engine_num_queue_reqs") == 0
        engine.hold = False
        assert live.generate(text="x").status_code == 200
        assert metric(live, "engine_num_aborted_requests_total") == requests


def test_abort_request_ends_with_what_is_there():
    with Live(FakeEngine(delay_s=0.02)) as live:
        fields = {"text": "x", "rid": "r", "sampling_params": {"max_new_tokens": 400}}
        with live.http.stream("POST", "/generate", json={**fields, "stream": True}) as response:
            chunks = response.iter_text()
            next(chunks)
            assert live.post("/abort_request", {"rid": "r"}).text == ""
            last = "".join(chunks).split("\n\n")[-3]
        meta = json.loads(last.removeprefix("data: "))["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"


def test_abort_matches_whole_ids_and_parents():
    with Live(FakeEngine(hold=True)) as live:
        with (
            live.http.stream("POST", "/generate", json={"text": "x", "rid": "ab", "stream": True}),
            live.http.stream(
                "POST", "/generate", json={"text": ["x", "y"], "rid": "b", "stream": True}
            ),
        ):
            live.post("/abort_request", {"rid": "a"})
            live.post("/abort_request", {"rid": ""})
            assert live.engine.aborted == []
            live.post("/abort_request", {"rid": "b"})
            assert live.engine.aborted == ["b_0", "b_1"]
            live.post("/abort_request", {"abort_all": True})
            assert live.engine.aborted == ["b_0", "b_1", "ab"]
    assert live.server.children == {}


@pytest.mark.parametrize("body", [[], {"rid": 5}, {"abort_all": "yes"}])
def test_abort_checks_its_body(live: Live, body: object):
    assert live.post("/abort_request", body).status_code == 400


def test_a_slow_reader_gets_merged_updates():
    """While nobody reads, memory does not grow by a frame per token: what waits is merged."""
    answer = "abcdefghij" * 40
    with Live(FakeEngine(answer=lambda prompt, sample: answer)) as live:
        sampling = {"max_new_tokens": 400, "n": 16}
        request = {"text": "x", "stream": True, "sampling_params": sampling}
        with live.http.stream("POST", "/generate", json=request) as response:
            wait_until(lambda: not live.engine.running, 10)
            frames = "".join(response.iter_text()).split("\n\n")
    assert frames[-2] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert {chunk["index"]: chunk["text"] for chunk in chunks} == dict.fromkeys(range(16), answer)
    assert len(chunks) < 16 * 400
