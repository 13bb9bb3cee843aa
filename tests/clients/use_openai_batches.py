"""The `openai` package's files and batches, end to end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import openai
import pytest

DEADLINE_S = 90


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="None", max_retries=0) as client:
        yield client


def _line(custom_id: str, model: str, **body: object) -> bytes:
    messages = [{"role": "user", "content": "Say hi."}]
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": messages, "max_tokens": 4, **body},
    }
    return json.dumps(line).encode() + b"\n"


def test_files(client: openai.OpenAI) -> None:
    file = client.files.create(file=("some.jsonl", b"{}\n"), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == (
        "file",
        3,
        "some.jsonl",
        "batch",
    )
    assert client.files.retrieve(file.id).id == file.id
    assert file.id in [one.id for one in client.files.list()]
    assert client.files.content(file.id).read() == b"{}\n"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_batch(client: openai.OpenAI, model: str) -> None:
    lines = _line("a", model) + _line("b", model, temperature=-1) + _line("c", model)
    file = client.files.create(file=("in.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "tests"},
    )
    deadline = time.monotonic() + DEADLINE_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert batch.metadata == {"of": "tests"}
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    assert [answer["custom_id"] for answer in answers] == ["a", "c"]
    assert all(answer["response"]["body"]["choices"][0]["message"] for answer in answers)
    [error] = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(error)["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [one.id for one in client.batches.list(limit=5)]


def test_a_batch_is_cancelled(client: openai.OpenAI, model: str) -> None:
    lines = b"".join(_line(str(n), model, max_tokens=500, min_tokens=500) for n in range(64))
    file = client.files.create(file=("long.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    deadline = time.monotonic() + DEADLINE_S
    while batch.status != "cancelled":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
