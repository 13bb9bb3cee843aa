"""What routers are told of the load."""

from __future__ import annotations

import re
import time

import pytest
from tests.server.fake_engine import FACTS, FakeEngine
from tests.server.live import Live

from trunkline.server.config import ApiOptions, HttpOptions, ServerConfig

HEADER = "x-trunkline-load"


def counts(value: str) -> dict[str, int]:
    assert re.fullmatch(r"[a-z_]+=\d+(, [a-z_]+=\d+)*", value)
    return {
        name: int(count) for name, _, count in (one.partition("=") for one in value.split(", "))
    }


def test_the_header_counts_what_is_in_flight():
    engine = FakeEngine(hold=True)
    with Live(engine) as live:
        idle = counts(live.http.get("/health").headers[HEADER])
        assert idle == {
            **dict.fromkeys(("running", "waiting", "waiting_tokens", "used_tokens"), 0),
            "total_tokens": FACTS.max_total_tokens,
            "max_running": FACTS.max_running_requests,
        }
        body = {"text": ["abc", "defgh"], "stream": True}
        with live.http.stream("POST", "/generate", json=body) as response:
            at_start = counts(response.headers[HEADER])
            assert (at_start["waiting"], at_start["waiting_tokens"]) == (2, 8)
            deadline = time.monotonic() + 5
            while counts(live.http.get("/health").headers[HEADER])["used_tokens"] != 8:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        engine.hold = False
        engine.delay_s = 0.02
        body = {"text": "abc", "stream": True, "sampling_params": {"n": 3}}
        with live.http.stream("POST", "/generate", json=body) as response:
            chunks = response.iter_text()
            next(chunks)
            deadline = time.monotonic() + 5
            while (busy := counts(live.http.get("/health").headers[HEADER]))["running"] != 3:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            assert busy["waiting"] == 0
            assert "".join(chunks).endswith("[DONE]\n\n")
        deadline = time.monotonic() + 5
        while counts(live.http.get("/health").headers[HEADER]) != idle:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_header_can_be_left_out():
    config = ServerConfig(api=ApiOptions(load_header=False), http=HttpOptions(api_workers=2))
    with Live(config=config) as live:
        assert HEADER not in live.generate(text="x").headers
        assert live.server._follower is None, "nobody wants to know the load of one engine"


def test_the_load_of_several_engines_is_followed_without_the_header():
    config = ServerConfig(api=ApiOptions(load_header=False))
    with Live(config=config, more_engines=[FakeEngine()]) as live:
        assert HEADER not in live.generate(text="x").headers
        assert live.server._follower is not None, "it decides which gets a request"


def test_loads():
    with Live(FakeEngine(hold=True)) as live:
        with live.http.stream("POST", "/generate", json={"text": "abcd", "stream": True}):
            body = live.http.get("/v1/loads").json()
            [load] = body["loads"]
            assert body["accelerator"] == "cpu"
            assert abs(load["timestamp"] - time.time()) < 5
            assert load["num_running_reqs"] == 0
            assert load["num_waiting_reqs"] == 1
            assert load["num_used_tokens"] == 4
            assert load["max_total_num_tokens"] == 4096
            assert load["token_usage"] == 4 / 4096
            assert "memory" not in load
        [load] = live.http.get("/v1/loads?include=core,memory,queues&dp_rank=0").json()["loads"]
        assert load["memory"]["token_capacity"] == 4096
        assert load["queues"]["retracted"] == 2


def test_blocks_of_other_engines_are_named(live: Live):
    response = live.http.get("/v1/loads?include=memory,spec,lora")
    assert response.headers["x-ignored-fields"] == "include.lora, include.spec"
    assert "memory" in response.json()["loads"][0]
    assert "x-ignored-fields" not in live.http.get("/v1/loads?include=all").headers


@pytest.mark.parametrize("query", ["include=banana", "format=xml", "dp_rank=1", "dp_rank=x"])
def test_bad_questions(live: Live, query: str):
    response = live.http.get(f"/v1/loads?{query}")
    assert response.status_code == 400
    assert query.partition("=")[0] in response.json()["message"]


def test_no_load_of_an_engine_that_never_answered():
    with Live() as live:
        live.call(lambda: live.engine.set_status("starting"))
        assert live.http.get("/v1/loads").status_code == 503
