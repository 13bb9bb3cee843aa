"""/v1/score and /v1/rerank over a fake engine: token i has the log-prob -i/1000 everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.server.fake_engine import ByteTokenizer
from tests.server.live import MODEL, Live

RERANKER = (
    "<Instruct>{{ instruct | default('find') }}<Query>{{ messages[0].content }}"
    "<Document>{{ messages[1].content }}"
)


def score(live: Live, **fields: Any) -> Any:
    body = {"query": "Q", "items": ["a", "b"], "label_token_ids": [10, 20], **fields}
    return live.post("/v1/score", body)


def prompts(live: Live, count: int) -> list[str]:
    return [bytes(one.prompt).decode() for one in live.engine.submitted[-count:]]


def test_the_answer_has_exactly_these_rows(live: Live):
    row = [pytest.approx(math.exp(-0.01)), pytest.approx(math.exp(-0.02))]
    assert score(live, model=MODEL).json() == {
        "object": "scoring",
        "model": MODEL,
        "scores": [row, row],
        "usage": {
            "prompt_tokens": 4,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert prompts(live, 2) == ["Qa", "Qb"]


def test_softmax_is_among_the_labels(live: Live):
    [row, _] = score(live, apply_softmax=True).json()["scores"]
    assert sum(row) == pytest.approx(1)
    assert row[0] / row[1] == pytest.approx(math.exp(0.01))


def test_items_may_come_first_or_alone_or_as_ids(live: Live):
    score(live, item_first=True)
    assert prompts(live, 2) == ["aQ", "bQ"]
    assert len(score(live, items="only").json()["scores"]) == 1
    score(live, query=[1, 2], items=[[3], [4, 5]])
    assert [one.prompt for one in live.engine.submitted[-2:]] == [[1, 2, 3], [1, 2, 4, 5]]


def test_a_temperature_is_that_of_the_distribution(live: Live):
    score(live, temperature=2.0)
    submitted = live.engine.submitted[-1]
    assert submitted.logprobs is not None
    assert (submitted.sampling.temperature, submitted.logprobs.processed) == (2.0, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": 5}, "query"),
        ({"items": None}, "items"),
        ({"items": []}, "items"),
        ({"items": [[1], [2]]}, "items[0]"),
        ({"query": [1], "items": ["a"]}, "items[0]"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [300]}, "label_token_ids"),
        ({"label_token_ids": [1] * 1025}, "label_token_ids"),
        ({"temperature": 0}, "temperature"),
        ({"apply_softmax": "yes"}, "apply_softmax"),
        ({"return_token_logprobs": True}, "return_token_logprobs"),
        ({"score_extraction_token": 5}, "score_extraction_token"),
    ],
)
def test_refusals_name_the_field(live: Live, fields: dict[str, Any], param: str):
    response = score(live, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["param"] == param


@pytest.fixture
def reranker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose template judges documents, and whose tokenizer has tokens for the answers."""
    answers = {"yes": [20], "no": [10]}
    encode = ByteTokenizer.encode_batch

    def encode_batch(self: Any, texts: Any, add_special_tokens: bool = True) -> Any:
        return [answers.get(text) or encode(self, [text])[0] for text in texts]

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    with Live(template=RERANKER) as live:
        yield live


def rerank(live: Live, **fields: Any) -> Any:
    body = {"query": "capital?", "documents": ["Paris", "Rome", "Oslo"], **fields}
    return live.post("/v1/rerank", body)


def test_documents_are_put_in_order(reranker: Live):
    rows = rerank(reranker, instruct="judge").json()
    assert [row["index"] for row in rows] == [0, 1, 2]  # all are equal here
    assert {row["score"] for row in rows} == {rows[0]["score"]}
    assert rows[0]["score"] == pytest.approx(1 / (1 + math.exp(0.01)))
    assert rows[1]["document"] == "Rome"
    assert rows[1]["meta_info"]["prompt_tokens"] == len(prompts(reranker, 3)[1])
    assert prompts(reranker, 3)[0] == "<Instruct>judge<Query>capital?<Document>Paris"
    assert len(rerank(reranker, top_n=2).json()) == 2
    assert prompts(reranker, 3)[0].startswith("<Instruct>find")
    assert rerank(reranker, return_documents=False).json()[0]["document"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [5]}, "documents[0]"),
        ({"top_n": 0}, "top_n"),
        ({"query": None}, "query"),
        ({"documents": ["x" * 600]}, "documents[0]"),
    ],
)
def test_rerank_refuses(reranker: Live, fields: dict[str, Any], param: str):
    response = rerank(reranker, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["param"] == param


def test_a_model_that_is_no_reranker_says_so(live: Live):
    response = rerank(live)
    assert response.status_code == 400
    assert "no reranker" in response.json()["message"]
