"""A server over several engines: pinning, what it reports of each rank, and one of them dead."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from shutil import which
from typing import Any

import psutil
import pytest
from tests.checkpoints import TinyCheckpoint
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live
from tests.server.process import READY, Process
from tests.server.test_load import counts

from trunkline.engine.shares import allowed_cores

PIN = "X-Data-Parallel-Rank"


@pytest.fixture
def pair() -> Iterator[Live]:
    with Live(FakeEngine(), more_engines=[FakeEngine()]) as live:
        yield live


def rank_of(answer: Any) -> int:
    return int(answer.json()["meta_info"]["dp_rank"])


def test_requests_name_their_rank(pair: Live) -> None:
    for rank in (1, 0, 1):
        for pin in ({"routed_dp_rank": rank}, {"data_parallel_rank": rank}):
            assert rank_of(pair.generate(text="x", **pin)) == rank
        headers = {PIN: str(rank)}
        assert rank_of(pair.post("/generate", {"text": "x"}, headers=headers)) == rank
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/responses", {"input": "x", "background": True}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        ):
            before = [len(engine.submitted) for engine in pair.engines]
            assert pair.post(path, body, headers=headers).status_code == 200
            assert pair.post(path, {**body, "data_parallel_rank": rank}).status_code == 200
            new = [
                len(engine.submitted) - n for engine, n in zip(pair.engines, before, strict=True)
            ]
            assert new[rank] >= 2
            assert new[1 - rank] == 0
    batch = pair.generate(text=["a", "b", "c"], routed_dp_rank=1).json()
    assert [row["meta_info"]["dp_rank"] for row in batch] == [1] * 3


@pytest.mark.parametrize(
    ("fields", "header", "param"),
    [
        ({"routed_dp_rank": 2}, None, "routed_dp_rank"),
        ({"data_parallel_rank": -1}, None, "data_parallel_rank"),
        ({"data_parallel_rank": True}, None, "data_parallel_rank"),
        ({"data_parallel_rank": "1"}, None, "data_parallel_rank"),
        ({"data_parallel_rank": 0, "routed_dp_rank": 1}, None, "data_parallel_rank"),
        ({}, "2", "x-data-parallel-rank"),
        ({}, "-1", "x-data-parallel-rank"),
        ({}, "one", "x-data-parallel-rank"),
        ({}, "9" * 30, "x-data-parallel-rank"),
        ({"data_parallel_rank": 0}, "1", "x-data-parallel-rank"),
    ],
)
def test_a_rank_that_is_none_is_refused(
    pair: Live, fields: dict[str, Any], header: str | None, param: str
) -> None:
    headers = {} if header is None else {PIN: header}
    bodies = {
        "/generate": {"text": "x", "stream": True},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    for path, body in bodies.items():
        response = pair.post(path, {**body, **fields}, headers=headers)
        assert response.status_code == 400
        assert response.json()["param"] == param
    assert not any(engine.submitted for engine in pair.engines)


def test_a_single_engine_has_rank_0_and_does_not_tell(live: Live) -> None:
    body = {"text": "x", "data_parallel_rank": 0}
    response = live.post("/generate", body, headers={PIN: "0"})
    assert response.json()["meta_info"]["dp_rank"] is None
    assert live.post("/generate", {"text": "x"}, headers={PIN: "1"}).status_code == 400
    assert "aggregate" not in live.http.get("/v1/loads").json()
    assert 'dp_rank="' not in live.http.get("/metrics").text


def test_loads_of_each_rank_and_of_all(pair: Live) -> None:
    for engine in pair.engines:
        engine.hold = True
    texts = ["abcd"] * 2 + ["abcdefgh"]
    with pair.http.stream(
        "POST", "/generate", json={"text": texts[:2], "stream": True, "routed_dp_rank": 1}
    ), pair.http.stream(
        "POST", "/generate", json={"text": texts[2:], "stream": True, "routed_dp_rank": 0}
    ) as last:  # fmt: skip
        at_start = counts(last.headers["x-trunkline-load"])
        assert (at_start["waiting"], at_start["waiting_tokens"]) == (3, 16)
        assert (at_start["total_tokens"], at_start["max_running"]) == (8192, 128)
        body = pair.http.get("/v1/loads").json()
        assert [load["dp_rank"] for load in body["loads"]] == [0, 1]
        assert [load["num_waiting_reqs"] for load in body["loads"]] == [1, 2]
        together = body["aggregate"]
        assert (together["num_ranks"], together["num_ready_ranks"]) == (2, 2)
        assert (together["num_waiting_reqs"], together["num_used_tokens"]) == (3, 16)
        assert together["token_usage"] == 16 / 8192
        one = pair.http.get("/v1/loads?dp_rank=1").json()
        assert [load["dp_rank"] for load in one["loads"]] == [1]
        assert "aggregate" not in one
    for bad in ("2", "x", "-1"):
        response = pair.http.get(f"/v1/loads?dp_rank={bad}")
        assert (response.status_code, response.json()["param"]) == (400, "dp_rank")


def test_metrics_have_the_rank(pair: Live) -> None:
    pair.generate(text="x")
    text = pair.http.get("/metrics").text
    for rank in "01":
        assert f'engine_num_running_reqs{{dp_rank="{rank}",model_name="fake/model"}} 0.0' in text
        assert f'engine_up{{dp_rank="{rank}",model_name="fake/model"}} 1.0' in text
        labels = f'{{dp_rank="{rank}",model_name="fake/model"}}'
        assert f"engine_num_retracted_requests_total{labels} 2.0" in text
    samples = re.findall(r"engine_dp_(\S+?)\{(.*)\} (\S+)", text)
    assert sum(float(value) for name, _, value in samples if name == "requests_total") == 1
    assert {
        label for _, labels, _ in samples for label in re.findall(r'account="(\w+)"', labels)
    } == {
        "predicted",
        "found",
    }
    if which("promtool") is not None:
        check = subprocess.run(
            ["promtool", "check", "metrics"], input=text.encode(), capture_output=True
        )
        assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def test_with_one_rank_dead_the_other_serves(pair: Live) -> None:
    pair.http.get("/metrics")
    pair.call(pair.engines[0].kill)
    assert pair.http.get("/health").status_code == 200
    assert {rank_of(pair.generate(text="x")) for _ in range(4)} == {1}
    pinned = pair.generate(text="x", data_parallel_rank=0)
    assert pinned.status_code == 503
    assert pinned.json()["error"]["code"] == "engine_unavailable"
    metrics = pair.http.get("/metrics").text
    assert 'engine_up{dp_rank="0",model_name="fake/model"} 0.0' in metrics
    assert 'engine_num_running_reqs{dp_rank="0"' not in metrics
    body = pair.http.get("/v1/loads").json()
    assert [load["dp_rank"] for load in body["loads"]] == [1]
    assert body["aggregate"]["num_ready_ranks"] == 1
    states = pair.http.get("/server_info").json()["internal_states"]
    assert [(one["dp_rank"], one["state"]) for one in states] == [(0, "starting"), (1, "ready")]
    assert pair.http.post("/flush_cache").status_code == 200
    pair.call(pair.engines[1].kill)
    assert pair.http.get("/health").status_code == 503
    assert pair.generate(text="x").status_code == 503
    pair.call(pair.engines[0].restart)
    assert pair.http.get("/health").status_code == 200
    assert rank_of(pair.generate(text="x")) == 0


def test_aborts_and_flushes_reach_all_ranks(pair: Live) -> None:
    for engine in pair.engines:
        engine.hold = True
    answers: list[Any] = []

    def ask(rank: int) -> None:
        body = {"text": "x", "rid": f"r{rank}", "routed_dp_rank": rank}
        answers.append(pair.http.post("/generate", json=body).json())

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while not all(engine.submitted for engine in pair.engines):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pair.http.post("/flush_cache").status_code == 400
    pair.http.post("/abort_request", json={"rid": "r1"})
    pair.http.post("/abort_request", json={"abort_all": True})
    for thread in threads:
        thread.join(10)
    assert {one["meta_info"]["finish_reason"]["type"] for one in answers} == {"abort"}
    assert pair.http.post("/flush_cache").status_code == 200


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    config = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    model = TinyCheckpoint(config=config).write(tmp_path_factory.mktemp("model"))
    process = Process(model, "--dp-size", "2", "--max-running-requests", "8")
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()


def test_two_real_engines_give_the_same_tokens(two_ranks: Process) -> None:
    sampling = {"temperature": 1, "max_new_tokens": 40, "ignore_eos": True}

    def ask(rank: int | None, text: str) -> dict[str, Any]:
        body = {
            "text": text, "rid": "one", "sampling_params": sampling,
            "return_logprob": True, "data_parallel_rank": rank,
        }  # fmt: skip
        answer: dict[str, Any] = two_ranks.http.post("/generate", json=body).json()
        return answer

    text = "the quick brown fox jumps over the lazy dog " * 4
    first, second, any_rank = ask(0, text), ask(1, text), ask(None, text)
    for answer, rank in ((first, 0), (second, 1)):
        assert answer["meta_info"]["dp_rank"] == rank
        assert answer["output_ids"] == first["output_ids"]
        logprobs = answer["meta_info"]["output_token_logprobs"]
        assert logprobs == first["meta_info"]["output_token_logprobs"]
    assert any_rank["output_ids"] == first["output_ids"]
    assert any_rank["meta_info"]["cached_tokens"] > 0
    lines = "\n".join(two_ranks.lines)
    assert all(
        re.search(rf"^\[[^]]+ DP{rank}\] max_total_num_tokens", lines, re.M) for rank in (0, 1)
    )
    threads = str(max(1, allowed_cores() // 2))
    for pid in _engine_pids(two_ranks):
        assert psutil.Process(pid).environ()["TRUNKLINE_CPU_THREADS"] == threads
    states = two_ranks.http.get("/server_info").json()["internal_states"]
    assert [one["effective_max_running_requests_per_dp"] for one in states] == [4, 4]


def test_a_stream_outlives_its_rank(two_ranks: Process) -> None:
    body = {
        "text": "the quick brown fox", "rid": "long", "stream": True,
        "sampling_params": {"temperature": 1, "max_new_tokens": 200, "ignore_eos": True},
    }  # fmt: skip
    whole = two_ranks.http.post("/generate", json={**body, "stream": False}).json()
    with two_ranks.http.stream("POST", "/generate", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)
        first = next(lines)
        home = int(re.search(r'"dp_rank":\s*(\d)', first).group(1))  # type: ignore[union-attr]
        states = two_ranks.http.get("/server_info").json()["internal_states"]
        pids = {child.pid for child in two_ranks.children}
        victim = _engine_pids(two_ranks)[home]
        assert victim in pids
        assert states[home]["state"] == "ready"
        os.kill(victim, signal.SIGKILL)
        last = ""
        for line in lines:
            last = line
        assert f'"dp_rank":{1 - home}' in last.replace(" ", "")
        ids = re.search(r'"output_ids":\s*\[([^]]*)\]', last).group(1)  # type: ignore[union-attr]
        assert [int(one) for one in ids.split(",")] == whole["output_ids"]
    assert two_ranks.http.get("/health").status_code == 200
    two_ranks.process.send_signal(signal.SIGTERM)
    assert two_ranks.end() == 0


def _engine_pids(process: Process) -> list[int]:
    """The engines' processes by rank: they were started in that order."""
    children = [
        child
        for child in psutil.Process(process.process.pid).children()
        if "trunkline.engine.process" in " ".join(child.cmdline())
    ]
    return [child.pid for child in sorted(children, key=lambda one: one.create_time())]
