import subprocess
from shutil import which

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.fake_engine import FakeEngine
from tests.server.live import MODEL, Live

from trunkline.server.config import ApiOptions, ServerConfig


def samples(text: str) -> dict[str, float]:
    """Sum over labels of every sample on /metrics."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


def test_health_follows_the_engine():
    with Live() as live:
        paths = ("/health", "/ready", "/health_generate")
        assert [live.http.get(path).status_code for path in paths] == [200, 200, 200]
        assert live.http.get("/health").content == b""
        live.call(lambda: live.engine.set_status("starting"))
        assert [live.http.get(path).status_code for path in paths] == [503, 503, 503]
        live.call(lambda: live.engine.set_status("ready"))
        live.server.draining = True
        assert [live.http.get(path).status_code for path in paths] == [503, 503, 503]
        live.server.draining = False
        assert live.http.get("/health").status_code == 200


def test_health_does_not_wait_behind_requests():
    with (
        Live(FakeEngine(hold=True)) as live,
        live.http.stream("POST", "/generate", json={"text": "x", "stream": True}),
    ):
        assert httpx.get(f"{live.url}/health", timeout=1).status_code == 200


def test_a_loop_that_stands_still_is_not_healthy(fresh: Live):
    status = fresh.engine.status()
    fresh.engine._status = type(status)(state="ready", epoch=1, heartbeat_age_s=120.0)
    assert fresh.http.get("/health").status_code == 503


def test_draining_refuses_new_work(fresh: Live):
    fresh.server.draining = True
    response = fresh.generate(text="x")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert fresh.http.get("/v1/models").status_code == 200


def test_models(live: Live):
    [card] = live.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == 512
    assert live.http.get("/v1/models/fake%2Fmodel").json() == card
    assert live.http.get("/v1/models/fake/model").json() == card
    missing = live.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["model_info", "server_info"])
def test_old_names_answer_alike(live: Live, name: str):
    new, old = live.http.get(f"/{name}").json(), live.http.get(f"/get_{name}").json()
    assert new.keys() == old.keys()


def test_server_info(live: Live):
    info = live.http.get("/server_info").json()
    assert info["max_total_num_tokens"] == 4096
    assert info["served_model_name"] == MODEL
    [state] = info["internal_states"]
    assert state["memory_usage"]["token_capacity"] == 4096
    assert "last_gen_throughput" in state


def test_banner_and_head(live: Live):
    assert MODEL in live.http.get("/").text
    assert live.http.head("/").content == b""
    assert live.http.head("/metrics").status_code == 200


def test_tokenize_and_back(live: Live):
    for path in ("/tokenize", "/v1/tokenize"):
        body = live.post(path, {"prompt": "hi"}).json()
        assert body == {"tokens": [104, 105], "count": 2, "max_model_len": 512}
    many = live.post("/tokenize", {"prompt": ["a", "bc"]}).json()
    assert (many["tokens"], many["count"]) == ([[97], [98, 99]], [1, 2])
    chat = live.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert bytes(chat["tokens"]) == b"<user>hi\n<assistant>"
    for path in ("/detokenize", "/v1/detokenize"):
        assert live.post(path, {"tokens": [104, 105]}).json() == {"text": "hi"}
    assert live.post("/detokenize", {"tokens": [[97], [98]]}).json() == {"text": ["a", "b"]}
    assert live.post("/detokenize", {"tokens": []}).json() == {"text": ""}
    nulls = dict.fromkeys(("messages", "add_special_tokens", "continue_final_message", "model"))
    assert live.post("/tokenize", {"prompt": "hi", **nulls}).json()["count"] == 2
    assert live.post("/detokenize", {"tokens": [104], "skip_special_tokens": None}).json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "banana": 1}),
        ("/detokenize", {"tokens": [300]}),
        ("/detokenize", {"tokens": [[1], 2]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ],
)
def test_tokenize_checks_its_body(live: Live, path: str, body: dict[str, object]):
    response = live.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_flush_cache(fresh: Live, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="trunkline.server"):
        assert fresh.http.get("/flush_cache").status_code == 200
    assert "Cache flushed successfully!" in caplog.messages
    assert fresh.http.post("/flush_cache").text == "Cache flushed.\n"
    fresh.engine.hold = True
    with fresh.http.stream("POST", "/generate", json={"text": "x", "stream": True}):
        busy = fresh.http.post("/flush_cache")
        assert busy.status_code == 400
        assert "requests are running or waiting" in busy.json()["error"]["message"]
        assert fresh.http.post("/flush_cache?timeout=0.1").status_code == 400
        assert fresh.http.post("/flush_cache?timeout=x").status_code == 400
        assert fresh.http.post("/flush_cache?timeout=").status_code == 400
    assert fresh.http.post("/flush_cache?timeout=2").status_code == 200


def test_metrics_agree_with_usage(fresh: Live):
    usages = [fresh.chat().json()["usage"] for _ in range(3)]
    usages.append(fresh.completion(["a", "b"], n=2).json()["usage"])
    fresh.chat(stream=True)
    figures = samples(fresh.http.get("/metrics").text)
    usages.append(usages[0])
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    assert figures["engine_prompt_tokens_total"] == prompt
    completion = sum(usage["completion_tokens"] for usage in usages)
    assert figures["engine_generation_tokens_total"] == completion
    requests = 6
    assert figures["engine_num_requests_total"] == requests
    assert figures["engine_e2e_request_latency_seconds_count"] == requests
    samples_made = 8
    assert figures["engine_time_to_first_token_seconds_count"] == samples_made
    assert figures["engine_inter_token_latency_seconds_count"] == completion - samples_made
    assert figures["engine_num_aborted_requests_total"] == 0
    assert figures["engine_num_running_reqs"] == 0
    assert figures["engine_max_total_num_tokens"] == 4096
    assert figures["engine_cache_hit_rate"] == 0.25
    assert figures["engine_num_retracted_requests_total"] == 2


def test_sglang_names_are_a_switch(live: Live):
    assert "sglang:" not in live.http.get("/metrics").text
    with Live(config=ServerConfig(api=ApiOptions(metrics_sglang_names=True))) as both:
        names = samples(both.http.get("/metrics").text)
        ours = {name.removeprefix("engine_") for name in names if name.startswith("engine_")}
        theirs = {name.removeprefix("sglang:") for name in names if name.startswith("sglang:")}
        assert ours == theirs
        assert {"num_running_reqs", "num_queue_reqs", "gen_throughput", "token_usage"} <= theirs


REFERENCE_METRICS = {
    *("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "gen_throughput"),
    *("cache_hit_rate", "prompt_tokens_total", "generation_tokens_total", "cached_tokens_total"),
    *("num_requests_total", "num_aborted_requests_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_bucket",),
}


@pytest.mark.skipif(which("promtool") is None, reason="promtool is not installed")
def test_sglang_names_are_unusual_and_nothing_else():
    with Live(config=ServerConfig(api=ApiOptions(metrics_sglang_names=True))) as both:
        both.chat()
        text = both.http.get("/metrics").text
    assert {f"sglang:{name}" for name in REFERENCE_METRICS} <= samples(text).keys()
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=text.encode(), capture_output=True
    )
    complaints = (check.stdout + check.stderr).decode().splitlines()
    assert complaints
    assert {line.partition(" ")[2] for line in complaints} == {
        "metric names should not contain ':'"
    }


def test_hostile_paths_do_not_grow_the_metrics(fresh: Live):
    for number in range(50):
        fresh.http.get(f"/nope/{number}")
    fresh.http.get("/v1/models/a%2Fb")
    fresh.http.get("/generate")
    text = fresh.http.get("/metrics").text
    assert "/nope" not in text
    assert 'endpoint="/v1/models/{name:path}"' in text
    assert 'endpoint="/generate",method="GET"' in text.replace('"fake/model",', "")


@pytest.mark.skipif(which("promtool") is None, reason="promtool is not installed")
def test_metrics_pass_promtool(fresh: Live):
    fresh.chat()
    fresh.chat(stream=True)
    text = fresh.http.get("/metrics").content
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def test_request_ids(live: Live):
    assert (
        live.http.get("/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    )
    for bad in ("x" * 300, "a b"):
        made = live.http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(made) == 32
    response = live.chat()
    assert response.headers["x-request-id"] == response.json()["id"]


def test_access_lines(live: Live, caplog: pytest.LogCaptureFixture):
    import logging

    with caplog.at_level(logging.INFO, logger="trunkline.access"):
        live.http.get("/v1/models?x=1")
        live.chat(stream=True)
        live.http.get("/nope")
    lines = [record.getMessage() for record in caplog.records if record.name == "trunkline.access"]
    assert [line.partition(" - ")[2] for line in lines] == [
        '"GET /v1/models?x=1 HTTP/1.1" 200 OK',
        '"POST /v1/chat/completions HTTP/1.1" 200 OK',
        '"GET /nope HTTP/1.1" 404 Not Found',
    ]
    assert lines[0].startswith("INFO:     127.0.0.1:")


def test_clients_cannot_add_rows_to_metrics(fresh: Live):
    for name in ("A", "B"):
        assert fresh.http.request(name, f"/{name}").status_code == 404
    families = text_string_to_metric_families(fresh.http.get("/metrics").text)
    labels = [
        (sample.labels["endpoint"], sample.labels["method"])
        for family in families
        for sample in family.samples
        if sample.name == "engine_http_requests_total" and sample.value == 2
    ]
    assert labels == [("other", "other")]
