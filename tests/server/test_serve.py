"""The life of the server around the app: the gate, draining, what a stop does to requests."""

import asyncio
import json
import resource
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.live import Live

from trunkline.server import serve
from trunkline.server.config import HttpOptions
from trunkline.server.connections import listen
from trunkline.server.serve import Gate, StartupError, allow_connections, bind, bind_all


def test_before_the_model_is_there():
    started, stop_me = threading.Event(), []
    ports: list[int] = []

    async def main() -> None:
        listener = bind(HttpOptions(port=0))
        ports.append(listener.getsockname()[1])
        stop = asyncio.Event()
        stop_me.append((asyncio.get_running_loop(), stop))
        asyncio.get_running_loop().call_soon(started.set)
        await listen(Gate(), listener, HttpOptions(), stop)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(5)
    for path in ("/health", "/v1/models"):
        response = httpx.get(f"http://127.0.0.1:{ports[0]}{path}")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the model is being loaded"
    [(loop, stop)] = stop_me
    loop.call_soon_threadsafe(stop.set)
    thread.join(5)
    assert not thread.is_alive()


def test_a_busy_port_is_a_startup_error():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1 port {port}"):
            bind(HttpOptions(port=port))


@pytest.mark.parametrize("options", [HttpOptions(port=99_999), HttpOptions(host="no.such.host.")])
def test_an_impossible_address(options: HttpOptions):
    with pytest.raises(StartupError, match="cannot listen on"):
        bind(options)


def drain(live: Live) -> None:
    asyncio.run_coroutine_threadsafe(
        serve.drain(live.server, live.server.client), live.loop
    ).result(20)


def test_an_address_may_be_lost_before_all_processes_have_it(monkeypatch):
    with socket.socket() as rival:
        rival.bind(("127.0.0.1", 0))
        rival.listen()
        first = SimpleNamespace(getsockname=rival.getsockname, close=lambda: None)
        monkeypatch.setattr(serve, "bind", lambda _: first)
        with pytest.raises(StartupError, match="choose another with --port"):
            bind_all(HttpOptions(port=0, api_workers=2))


def test_draining_lets_requests_end():
    with Live(FakeEngine(delay_s=0.02)) as live:
        with live.http.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:
            chunks = response.iter_text()
            first = next(chunks)
            thread = threading.Thread(target=drain, args=(live,))
            thread.start()
            time.sleep(0.05)
            assert httpx.get(f"{live.url}/health").status_code == 503
            late = httpx.post(f"{live.url}/generate", json={"text": "y"})
            assert late.status_code == 503
            text = first + "".join(chunks)
        thread.join(5)
        assert not thread.is_alive()
        assert text.endswith("data: [DONE]\n\n")
        assert '"text":"Hello world"' in text


def test_what_outlives_the_grace_time_is_told(monkeypatch: pytest.MonkeyPatch):
    with Live(FakeEngine(delay_s=0.02)) as live:
        object.__setattr__(live.server.config.http, "shutdown_grace_s", 0.1)
        body = {"text": "x", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with live.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            chunks = response.iter_text()
            next(chunks)
            drain(live)
            last = "".join(chunks).split("\n\n")[-2]
        assert "the engine cannot answer: the server is shutting down" in last
        assert live.server.in_flight == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_does_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch, path: str, chunked: bool
):
    threads: list[threading.Thread] = []
    encode = ByteTokenizer.encode_batch

    def noted(*arguments: Any, **options: Any) -> list[list[int]]:
        threads.append(threading.current_thread())
        return encode(*arguments, **options)

    field = "text" if path == "/generate" else "prompt"
    body = json.dumps({field: ["x" * 50] * 100}).encode()
    with Live() as live:
        monkeypatch.setattr(ByteTokenizer, "encode_batch", noted)
        content = iter([body]) if chunked else body
        headers = {"content-type": "application/json"}
        live.http.post(path, content=content, headers=headers)
        assert len(threads) == 1
        assert threads[0] is not live._thread


def test_head_and_body_of_a_response_are_one_write(monkeypatch: pytest.MonkeyPatch):
    writes: list[bytes] = []
    write = asyncio.StreamWriter.write

    def noted(self: asyncio.StreamWriter, data: bytes) -> None:
        writes.append(data)
        write(self, data)

    with Live() as live:
        monkeypatch.setattr(asyncio.StreamWriter, "write", noted)
        answer = live.generate(text="x")
        assert answer.status_code == 200
        [sent] = writes
        assert sent.startswith(b"HTTP/1.1 200")
        assert sent.endswith(answer.content)


def test_connections_may_take_all_descriptors_that_are_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65536, before[1]), before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
