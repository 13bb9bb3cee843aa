"""`engine-router` as a process: flags, workers, a client library, the end."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import httpx
import openai
import pytest

from trunkline.server.router.cli import UsageError, parse

STREAM = b'data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'  # noqa: E501


class Handler(http.server.BaseHTTPRequestHandler):
    """A worker that streams one event and then breaks off, unless the path is another."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Say nothing."""

    def answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            sent = {"body": body.decode(), "headers": dict(self.headers.items())}
            self.answer(json.dumps(sent).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(STREAM), STREAM))
        self.wfile.flush()
        self.close_connection = True


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def running(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "trunkline.server.router.cli", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            else:
                raise AssertionError("it ended")
            while httpx.get(f"{found[1]}/health").status_code != 200:
                pass
            yield process, found[1]
        finally:
            process.kill()


def test_the_command_serves_until_a_signal(worker: str) -> None:
    with running("--worker-urls", worker, "--threads", "1") as (process, url):
        body = '{"text": "x",  "unknown": [1.50, "\\u00e9"], "text": "y"}'
        headers = {"x-request-id": "my id", "x-kept": "1", "content-type": "application/json"}
        answer = httpx.post(f"{url}/generate", content=body, headers=headers)
        assert answer.json()["body"] == body
        got = {name.lower(): value for name, value in answer.json()["headers"].items()}
        assert (got["x-kept"], got["x-request-id"], got["host"]) == ("1", "my id", worker[7:])
        assert answer.headers["x-request-id"] == "my id"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_client_library_understands_the_error_event(worker: str) -> None:
    with running("--worker-urls", worker) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        texts = []
        with pytest.raises(openai.APIError, match="the worker broke off its answer"):
            texts += [chunk.choices[0].delta.content for chunk in stream]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_metrics_are_well_formed(worker: str) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with running("--worker-urls", worker) as (_, url):
        httpx.post(f"{url}/generate", json={"text": "x"})
        text = httpx.get(f"{url}/metrics").text
    families = {one.name: one for one in parser.text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    assert all(name.startswith("engine_router_") for name in families)
    (sample,) = [
        one for one in families["engine_router_requests"].samples if one.labels["code"] == "200"
        and one.labels["route"] == "/generate"
    ]  # fmt: skip
    assert sample.value == 1
    if which("promtool") is not None:
        check = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert check.returncode == 0, check.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--polcy", "x"], "unrecognized arguments: --polcy; did you mean --policy?"),
        (["--worker-url", "http://x"], "did you mean --worker-urls?"),
        (["http://x"], "workers are given with --worker-urls"),
        (["--port", "65536"], "must be at most 65535, got 65536"),
        (["--idle-timeout-s", "inf"], "must be at most"),
        ([], "there are no workers: give --worker-urls, or --admin-api-key"),
        (["--policy", "best"], "invalid choice: 'best'"),
        (["--load-bound", "0.5"], "must be at least 1, got 0.5"),
        (["--port", "x"], "invalid int value: 'x'"),
        (["--admin-api-key", ""], "--admin-api-key is empty; leave it out to do without"),
        (["--worker-api-key", "a b", "--worker-urls", "http://x"], "--worker-api-key has a key"),
        (
            ["--breaker-max-open-s", "0.5", "--worker-urls", "http://x"],
            "--breaker-max-open-s is 0.5, but a worker is left alone for --breaker-open-s 1",
        ),
    ],
)
def test_unusable_flags_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(words, {})


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], []),
        (["--seed", "1", "--placement-slack", "1", "--cache-tokens", "9"], []),
        (["--policy", "prefix_hash", "--load-bound", "2", "--head-blocks", "3"], []),
        (["--policy", "round_robin", "--seed", "1"], ["seed"]),
        (
            ["--policy", "random", "--kv-weight", "1", "--decode-weight", "1"],
            ["decode_weight", "kv_weight"],
        ),
        (["--load-bound", "2"], ["load_bound"]),
        (
            ["--policy", "session", "--block-bytes", "9", "--cache-tokens", "9"],
            ["block_bytes", "cache_tokens"],
        ),
        (["--max-in-flight", "4", "--max-in-flight-per-worker", "4"], ["max_in_flight_per_worker"]),
        (["--max-in-flight", "4", "--max-in-flight-per-worker", "3"], []),
        (["--max-in-flight-per-worker", "3"], []),
        (["--breaker-open-s", "60"], []),
    ],
)
def test_what_changes_nothing_is_named(words: list[str], names: list[str]) -> None:
    _, _, warnings = parse([*words, "--worker-urls", "http://x"], {})
    assert [one.partition(" has no effect: ")[0] for one in warnings] == names


def test_an_empty_key_of_the_environment_is_refused() -> None:
    with pytest.raises(UsageError, match="--api-key is empty"):
        parse(["--worker-urls", "http://x"], {"TRUNKLINE_ROUTER_API_KEY": ""})


def test_flags_go_before_the_environment() -> None:
    environment = {"TRUNKLINE_ROUTER_API_KEY": "a", "TRUNKLINE_ROUTER_ADMIN_API_KEY": "b"}
    config, urls, _ = parse(
        ["--api-key", "c", "--worker-urls", "http://x", "http://y"], environment
    )
    assert (config.listen.api_key, config.listen.admin_api_key) == ("c", "b")
    assert urls == ["http://x", "http://y"]


def test_workers_may_come_later() -> None:
    assert parse(["--admin-api-key", "a"], {})[1] == []
    assert parse([], {"TRUNKLINE_ROUTER_ADMIN_API_KEY": "a"})[1] == []


def test_a_start_that_cannot_be_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trunkline.server.router.cli", "--worker-urls", "https://x"]
    words = [*command, "--port", "0", "--load-bound", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "load_bound has no effect: the policy 'cache_aware' does not read it" in done.stderr
    assert "TLS to workers is not supported; give http://host:port" in done.stderr
