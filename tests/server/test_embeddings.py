"""/v1/embeddings and /encode over a fake engine, whose states are easy to foresee."""

from __future__ import annotations

import base64
import struct
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from tests.server.fake_engine import CONTEXT, HIDDEN, FakeEngine
from tests.server.live import MODEL, Live

from trunkline.server.config import ApiOptions, ServerConfig


def state(prompt: list[int]) -> list[float]:
    """What the fake engine's state of a prompt becomes."""
    first, second = 2.0 * sum(prompt), float(len(prompt))
    length = (first**2 + second**2) ** 0.5
    return [first / length, second / length, 0.0, 0.0]


def embed(live: Live, value: Any, **fields: Any) -> httpx.Response:
    return live.post("/v1/embeddings", {"input": value, **fields})


def vectors(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def test_the_answer_has_exactly_these_rows(live: Live):
    assert embed(live, "hi").json() == {
        "object": "list",
        "model": "default",
        "data": [
            {"object": "embedding", "index": 0, "embedding": pytest.approx(state([104, 105]))}
        ],
        "usage": {
            "prompt_tokens": 2,
            "total_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    submitted = live.engine.submitted[-1]
    assert (submitted.pooled, submitted.n, submitted.sampling.max_new_tokens) == (True, 1, 0)


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        (["hi", "you"], [[104, 105], [121, 111, 117]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([[1] * CONTEXT], [[1] * CONTEXT]),
    ],
)
def test_inputs(live: Live, value: Any, prompts: list[list[int]]):
    response = embed(live, value, model=MODEL)
    assert vectors(response) == [pytest.approx(state(prompt)) for prompt in prompts]
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert response.json()["model"] == MODEL


def test_dimensions_are_cut_and_scaled_again(live: Live):
    assert vectors(embed(live, "hi", dimensions=1)) == [[1.0]]
    assert vectors(embed(live, "hi", dimensions=HIDDEN)) == vectors(embed(live, "hi"))


def test_base64_holds_the_same_floats(live: Live):
    [text] = vectors(embed(live, "hi", encoding_format="base64"))
    raw = struct.unpack(f"<{HIDDEN}f", base64.b64decode(text))
    [floats] = vectors(embed(live, "hi", encoding_format="float"))
    assert list(raw) == floats


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi", ""]}, "input[1]"),
        ({"input": ["hi", 5]}, "input[1]"),
        ({"input": [5, 300]}, "input"),
        ({"input": [1] * (CONTEXT + 1)}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[1] * CONTEXT] * 600}, "input"),
        ({"input": "hi", "dimensions": 0}, "dimensions"),
        ({"input": "hi", "dimensions": HIDDEN + 1}, "dimensions"),
        ({"input": "hi", "dimensions": 2.0}, "dimensions"),
        ({"input": "hi", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "hi", "messages": []}, "messages"),
        ({"input": "hi", "lora_path": "x"}, "lora_path"),
        ({"input": "hi", "rid": ""}, "rid"),
    ],
)
def test_refusals_name_the_field(live: Live, fields: dict[str, Any], param: str):
    response = live.post("/v1/embeddings", fields)
    assert response.status_code == 400, response.text
    assert response.json()["param"] == param


def test_other_models_are_missing(live: Live):
    assert embed(live, "hi", model="org/other").status_code == 404


def test_what_has_no_effect_is_named(live: Live):
    response = embed(live, "hi", user="me", zz=1)
    assert response.headers["x-ignored-fields"] == "zz"
    with Live(config=ServerConfig(api=ApiOptions(strict_fields=True))) as strict:
        assert embed(strict, "hi", zz=1).status_code == 400


def test_the_openai_package_asks_for_base64(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="None", max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=["hi", "you"], dimensions=2)
        assert [one.embedding for one in answer.data] == [
            pytest.approx(state([104, 105])[:2]),
            pytest.approx(state([121, 111, 117])[:2]),
        ]
        assert answer.usage.total_tokens == 5
        ids = client.embeddings.create(model=MODEL, input=[[5, 6], [7]], encoding_format="float")
        assert len(ids.data) == 2


def test_an_aborted_request_has_no_vector():
    with Live(FakeEngine(delay_s=0.2)) as live:
        results: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: results.append(embed(live, ["hi", "you"], rid="mine"))
        )
        ask.start()
        while len(live.engine.running) < 2:
            time.sleep(0.001)
        live.post("/abort_request", {"rid": "mine"})
        ask.join(10)
        assert results[0].status_code == 400
        assert results[0].json()["error"]["code"] == "no_answer"


def test_they_outlive_the_engine():
    with Live(FakeEngine(delay_s=0.2)) as live:
        results: list[httpx.Response] = []
        ask = threading.Thread(target=lambda: results.append(embed(live, ["hi", "you"])))
        ask.start()
        while len(live.engine.running) < 2:
            time.sleep(0.001)
        live.call(live.engine.kill)
        live.call(live.engine.restart)
        ask.join(10)
        assert len(live.engine.submitted) == 4
        assert all(submit.pooled for submit in live.engine.submitted)
        expected = [state([104, 105]), state([121, 111, 117])]
        assert vectors(results[0]) == [pytest.approx(one) for one in expected]


def test_encode(live: Live):
    answer = live.post("/encode", {"text": "hi", "rid": "mine", "dimensions": 2}).json()
    assert answer["embedding"] == pytest.approx(state([104, 105])[:2])
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("mine", 2, 1)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    rows = live.http.put("/encode", json={"input_ids": [[5, 6], [7]]}).json()
    assert [row["embedding"] for row in rows] == [
        pytest.approx(state([5, 6])),
        pytest.approx(state([7])),
    ]
    assert len(live.post("/encode", {"text": ["hi"]}).json()) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "hi", "input_ids": [1]}, "text"),
        ({"text": ["hi"] * 3, "rid": ["a", "b"]}, "rid"),
        ({"text": "hi", "dimensions": 99}, "dimensions"),
        ({"text": "hi", "image_data": "x"}, "image_data"),
        ({"text": "hi", "sampling_params": {"n": 2}}, "sampling_params"),
        ({"input_ids": [[1] * CONTEXT] * 600}, "input_ids"),
    ],
)
def test_encode_refuses(live: Live, body: dict[str, Any], param: str):
    response = live.post("/encode", body)
    assert response.status_code == 400, response.text
    assert response.json()["param"] == param


def test_metrics_count_prompts_without_tokens(fresh: Live):
    embed(fresh, ["hi", "you"])
    text = fresh.http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("engine_prompt_tokens_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == 5
