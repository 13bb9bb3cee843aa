"""/v1/batches over HTTP with the openai package: checks, answers, cancel, expiry, bounds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from tests.server.batches.harness import CHAT, chat_line, config, jsonl
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live

from trunkline.engine import messages
from trunkline.server.batches.lines import MAX_LINES
from trunkline.server.config import ApiOptions

ENDS = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with Live(config=config(tmp_path / "storage", batch_concurrency=4)) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.Client]:
    with openai.Client(base_url=f"{live.url}/v1", api_key="None", max_retries=0) as client:
        yield client


def start(client: openai.Client, content: bytes, endpoint: str = CHAT, **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    window = fields.pop("completion_window", "24h")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window=window,
        **fields,
    )


def wait(client: openai.Client, batch: Batch, seconds: float = 30) -> Batch:
    deadline = time.monotonic() + seconds
    while batch.status not in ENDS:
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
    return batch


def wait_until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines_of(client: openai.Client, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_embeddings_in_batches(client: openai.Client) -> None:
    inputs = ["hi", ["hi", "you"], [5, 6], ""]
    lines = [
        {"custom_id": f"id-{n}", "method": "POST", "url": "/v1/embeddings", "body": {"input": one}}
        for n, one in enumerate(inputs)
    ]
    batch = wait(client, start(client, jsonl(lines), "/v1/embeddings"))
    assert batch.status == "completed", batch.errors
    counts = batch.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (3, 1)
    answers = [line["response"]["body"] for line in lines_of(client, batch.output_file_id)]
    assert [len(answer["data"]) for answer in answers] == [1, 2, 1]
    assert client.batches.retrieve(batch.id).usage.input_tokens == 9  # type: ignore[union-attr]
    [failed] = lines_of(client, batch.error_file_id)
    assert failed["response"]["status_code"] == 400


def test_a_batch_from_start_to_end(client: openai.Client, live: Live) -> None:
    lines = [chat_line(f"id-{n}", f"number {n}") for n in range(50)]
    lines[7]["body"]["temperature"] = -1
    lines[9]["url"] = "/chat/completions"
    lines[11]["body"]["colour"] = "red"
    lines[12]["priority"] = 3
    batch = start(client, jsonl(lines), metadata={"a": "b"})
    assert batch.status == "validating"
    assert batch.request_counts is not None
    assert batch.expires_at == batch.created_at + 86400
    batch = wait(client, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"a": "b"}
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 50, "completed": 49, "failed": 1}
    for moment in (batch.in_progress_at, batch.finalizing_at, batch.completed_at):
        assert moment is not None
        assert batch.created_at <= moment <= time.time()
    output = lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"id-{n}" for n in range(50) if n != 7]
    first = output[0]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
    assert len({line["id"] for line in output}) == 49
    ignored = {
        line["custom_id"]: line["response"]["ignored_fields"]
        for line in output
        if "ignored_fields" in line["response"]
    }
    assert ignored == {"id-11": ["colour"], "id-12": ["line.priority"]}
    [error] = lines_of(client, batch.error_file_id)
    assert error["custom_id"] == "id-7"
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    tokens = [line["response"]["body"]["usage"] for line in output]
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in tokens)
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in tokens)
    assert {submit.request_class for submit in live.engine.submitted} == {1}
    assert [one.id for one in client.batches.list()] == [batch.id]
    assert batch.output_file_id is not None
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    client.files.delete(batch.output_file_id)
    client.files.delete(batch.input_file_id)
    assert 'engine_batch_requests_total{model_name="fake/model",outcome="completed"} 49.0' in (
        live.http.get("/metrics").text
    )


def test_responses_in_a_batch(client: openai.Client, live: Live) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": "hi"},
        {"input": "hi", "store": True},
        {"input": "hi", "background": True},
        {"input": [{"role": "user", "content": 5}]},
        {"input": "hi", "max_output_tokens": 3},
    ]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body}
        for number, body in enumerate(bodies)
    ]
    batch = wait(client, start(client, jsonl(lines), "/v1/responses"))
    assert batch.status == "completed"
    output = lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == ["0", "1", "4"]
    first, stored, short = (line["response"]["body"] for line in output)
    assert first["output"][0]["content"][0]["text"] == "Hello world"
    assert (first["store"], stored["store"]) == (False, True)
    assert live.http.get(f"/v1/responses/{first['id']}").status_code == 404
    assert live.http.get(f"/v1/responses/{stored['id']}").json() == stored
    assert (short["status"], short["usage"]["output_tokens"]) == ("incomplete", 3)
    errors = lines_of(client, batch.error_file_id)
    params = [line["response"]["body"]["error"]["param"] for line in errors]
    assert params == ["background", "input[0].content"]
    assert batch.usage is not None
    usages = [line["response"]["body"]["usage"] for line in output]
    assert batch.usage.input_tokens == sum(one["input_tokens"] for one in usages)
    assert batch.usage.output_tokens == sum(one["output_tokens"] for one in usages)


def test_the_async_client(live: Live) -> None:
    async def main() -> None:
        async with openai.AsyncClient(base_url=f"{live.url}/v1", api_key="None") as client:
            content = jsonl([chat_line("a"), chat_line("b")])
            file = await client.files.create(file=content, purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            while batch.status not in ENDS:
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            text = (await client.files.content(batch.output_file_id)).text
            assert [json.loads(line)["custom_id"] for line in text.splitlines()] == ["a", "b"]
            assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]

    asyncio.run(main())


def test_completions(client: openai.Client) -> None:
    bodies = [{"prompt": "hi"}, {"prompt": ["a", "b"], "n": 2}, {"prompt": [72, 105]}, {}]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    batch = wait(client, start(client, jsonl(lines), "/v1/completions"))
    output = lines_of(client, batch.output_file_id)
    assert [len(line["response"]["body"]["choices"]) for line in output] == [1, 4, 1]
    [error] = lines_of(client, batch.error_file_id)
    assert error["response"]["body"]["error"]["param"] == "prompt"


def test_a_single_choice_as_an_object(tmp_path: Path) -> None:
    with (
        Live(config=config(tmp_path, batch_choices_object=True)) as live,
        openai.Client(base_url=f"{live.url}/v1", api_key="None") as client,
    ):
        batch = wait(client, start(client, jsonl([chat_line("a"), chat_line("b", n=2)])))
        one, two = lines_of(client, batch.output_file_id)
        assert one["response"]["body"]["choices"]["message"]["content"] == "Hello world"
        assert len(two["response"]["body"]["choices"]) == 2


GOOD = chat_line("good")
BAD_LINES = [
    (b"{:", "invalid_json_line", None),
    (b"[1]", "invalid_json_line", None),
    (b"\xff\xfe", "invalid_json_line", None),
    (b"[" * 100_000, "invalid_json_line", None),
    (jsonl([{**GOOD, "custom_id": 5}]), "invalid_custom_id", "custom_id"),
    (jsonl([{**GOOD, "custom_id": ""}]), "invalid_custom_id", "custom_id"),
    (jsonl([{**GOOD, "custom_id": "x" * 513}]), "invalid_custom_id", "custom_id"),
    (jsonl([GOOD]), "duplicate_custom_id", "custom_id"),
    (jsonl([{**GOOD, "custom_id": "b", "method": "GET"}]), "invalid_method", "method"),
    (jsonl([{**GOOD, "custom_id": "b", "url": "/v1/completions"}]), "invalid_url", "url"),
    (jsonl([{**GOOD, "custom_id": "b", "url": "/v1"}]), "invalid_url", "url"),
    (jsonl([{**GOOD, "custom_id": "b", "body": []}]), "invalid_body", "body"),
    (jsonl([chat_line("b", stream=True)]), "invalid_body", "body.stream"),
    (jsonl([chat_line("b", model="other")]), "model_not_found", "body.model"),
    (jsonl([chat_line("b", model=5)]), "invalid_model", "body.model"),
]


@pytest.mark.parametrize(("line", "code", "param"), BAD_LINES)
def test_bad_lines_by_number(
    client: openai.Client, live: Live, line: bytes, code: str, param: str | None
) -> None:
    content = jsonl([GOOD]) + b"\n  \n" + line.rstrip(b"\n") + b"\n" + jsonl([chat_line("last")])
    batch = wait(client, start(client, content))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    [error] = batch.errors.data or []
    assert (error.code, error.line, error.param) == (code, 4, param)
    assert live.engine.submitted == []


def test_inputs_that_are_bad_as_a_whole(client: openai.Client) -> None:
    too_many = jsonl(
        {"custom_id": str(n), "method": "POST", "url": CHAT, "body": {}}
        for n in range(MAX_LINES + 1)
    )
    for content, codes in [
        (b"\n \n", ["empty_file"]),
        (b"{:\n" * 500, ["invalid_json_line"] * 100 + ["too_many_errors"]),
        (too_many, ["too_many_requests"]),
    ]:
        batch = wait(client, start(client, content))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [error.code for error in batch.errors.data or []] == codes


def test_line_endings_and_a_byte_order_mark(client: openai.Client) -> None:
    a, b = (json.dumps(chat_line(name)).encode() for name in "ab")
    batch = wait(client, start(client, b"\xef\xbb\xbf" + a + b"\r\n\r\n" + b))
    assert [line["custom_id"] for line in lines_of(client, batch.output_file_id)] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/nonsense"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
def test_bad_batches_are_refused(live: Live, change: dict[str, Any], param: str) -> None:
    file = live.http.post("/v1/files", files={"file": b"{}"}).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    response = live.post("/v1/batches", {**body, **change})
    assert response.status_code == 400
    assert response.json()["param"] == param


def test_an_input_must_be_for_batches(live: Live) -> None:
    files = {"file": b"{}"}
    file = live.http.post("/v1/files", files=files, data={"purpose": "user_data"}).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    response = live.post("/v1/batches", body)
    assert response.status_code == 400
    assert response.json()["param"] == "input_file_id"
    body["input_file_id"] = "file-" + "0" * 32
    assert live.post("/v1/batches", body).status_code == 404
    assert live.http.get("/v1/batches/batch_x").status_code == 404
    assert live.post("/v1/batches/batch_" + "0" * 32 + "/cancel", {}).status_code == 404


def test_counts_are_live_and_cancel_keeps_what_is_done(client: openai.Client, live: Live) -> None:
    live.engine.delay_s = 0.002
    batch = start(client, jsonl(chat_line(f"id-{n}") for n in range(500)))
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)

    def some_are_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return 10 <= counts.completed < 400

    wait_until(some_are_done)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    asked = client.batches.cancel(batch.id)
    assert asked.status == "cancelling"
    assert asked.cancelling_at is not None
    end = wait(client, asked)
    assert end.status == "cancelled"
    assert end.cancelled_at is not None
    assert end.cancelled_at >= asked.cancelling_at
    wait_until(lambda: not live.engine.running)
    output = lines_of(client, end.output_file_id)
    error = lines_of(client, end.error_file_id)
    assert end.request_counts is not None
    assert end.request_counts.completed == len(output) >= 10
    assert len(output) + len(error) == end.request_counts.total == 500
    assert {line["error"]["code"] for line in error} == {"batch_cancelled"}
    assert len({line["custom_id"] for line in output + error}) == 500
    submitted = len(live.engine.submitted)
    time.sleep(0.2)
    assert len(live.engine.submitted) == submitted
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        client.batches.cancel(batch.id)


def test_a_completed_batch_cannot_be_cancelled(client: openai.Client) -> None:
    batch = wait(client, start(client, jsonl([chat_line("a")])))
    with pytest.raises(openai.ConflictError, match="is completed"):
        client.batches.cancel(batch.id)


def test_a_batch_expires_with_what_is_done(client: openai.Client, live: Live) -> None:
    live.engine.delay_s = 0.02
    content = jsonl(chat_line(f"id-{n}") for n in range(200))
    batch = wait(client, start(client, content, completion_window="2s"))
    assert batch.status == "expired"
    assert batch.expired_at is not None
    output = lines_of(client, batch.output_file_id)
    error = lines_of(client, batch.error_file_id)
    assert output
    assert {line["error"]["code"] for line in error} == {"batch_expired"}
    assert len({line["custom_id"] for line in output + error}) == 200


def test_what_is_in_flight_is_bounded_and_gives_way(client: openai.Client, live: Live) -> None:
    live.engine.delay_s = 0.001
    most: list[int] = []
    held = 0

    def watch(prompt: list[int], sample: int) -> str:
        most.append(len(live.engine.running))
        return "Hello world" if not held else "Hello world, a longer answer"

    live.engine.answer = watch
    wait(client, start(client, jsonl(chat_line(f"id-{n}") for n in range(100))))
    assert 2 <= max(most) <= 4
    most.clear()
    live.engine.hold = True
    wait_until(lambda: not live.engine.running)
    asked = asyncio.run_coroutine_threadsafe(_hold(live.server), live.loop)
    live.engine.hold = False
    wait(client, start(client, jsonl(chat_line(f"id-{n}") for n in range(20))))
    asked.cancel()
    assert max(most) == 1


async def _hold(server: Any) -> None:
    with server.running("held", ["held"]):
        await asyncio.sleep(60)


def test_lines_wait_for_room_in_the_queue(client: openai.Client, live: Live) -> None:
    live.engine.refuse = messages.Refused(0, 503, "queue_full", "The request queue is full.", None)
    batch = start(client, jsonl(chat_line(f"id-{n}") for n in range(8)))
    wait_until(lambda: len(live.engine.submitted) >= 4)
    live.engine.refuse = None
    batch = wait(client, batch)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 8


def test_what_the_engine_refuses_is_an_error_line(client: openai.Client, live: Live) -> None:
    live.engine.refuse = messages.Refused(0, 400, "invalid_request_error", "No.", "prompt")
    batch = wait(client, start(client, jsonl([chat_line("a")])))
    [error] = lines_of(client, batch.error_file_id)
    assert error["response"]["status_code"] == 400
    assert batch.output_file_id is None


def test_a_failed_sample_is_an_error_line(client: openai.Client, live: Live) -> None:
    live.engine.fail_after = 3
    batch = wait(client, start(client, jsonl([chat_line("a")])))
    [error] = lines_of(client, batch.error_file_id)
    assert error["response"]["status_code"] == 500
    assert error["response"]["body"]["error"]["message"] == "logits are not finite"


def test_lines_outlive_the_engine(client: openai.Client, live: Live) -> None:
    live.engine.delay_s = 0.002
    batch = start(client, jsonl(chat_line(f"id-{n}") for n in range(60)))
    for _ in range(5):
        wait_until(lambda: bool(live.engine.running))
        time.sleep(0.05)  # each life gives every line that it runs a token
        live.call(live.engine.kill)
        time.sleep(0.03)
        live.call(live.engine.restart)
    batch = wait(client, batch)
    assert batch.status == "completed"
    assert len(lines_of(client, batch.output_file_id)) == 60
    assert batch.error_file_id is None


def test_a_line_that_kills_engines_fails_alone(tmp_path: Path) -> None:
    class Fragile(FakeEngine):
        def _submit(self, submit: messages.Submit) -> None:
            if b"poison" in bytes(submit.prompt):
                asyncio.get_running_loop().call_later(0.02, self._die)
            else:
                super()._submit(submit)

        def _die(self) -> None:
            self.kill()
            asyncio.get_running_loop().call_later(0.02, self.set_status, "ready")

    engine = Fragile(delay_s=0.002)
    with (
        Live(engine, config(tmp_path, batch_concurrency=8)) as live,
        openai.Client(base_url=f"{live.url}/v1", api_key="None") as client,
    ):
        lines = [chat_line(f"id-{n}", "poison" if n == 5 else "hi") for n in range(40)]
        batch = wait(client, start(client, jsonl(lines)))
        [error] = lines_of(client, batch.error_file_id)
        assert error["custom_id"] == "id-5"
        assert error["response"]["body"]["error"]["code"] == "engine_unavailable"
        assert len(lines_of(client, batch.output_file_id)) == 39


def test_several_batches_share_the_room(client: openai.Client, live: Live) -> None:
    live.engine.delay_s = 0.002
    large = start(client, jsonl(chat_line(f"id-{n}") for n in range(400)))
    wait_until(lambda: bool(live.engine.running))
    small = wait(client, start(client, jsonl([chat_line("a")])))
    assert small.status == "completed"
    assert client.batches.retrieve(large.id).status == "in_progress"
    client.batches.cancel(large.id)


def test_a_strict_server_refuses_what_has_fields_without_effect(tmp_path: Path) -> None:
    strict = replace(config(tmp_path / "storage"), api=ApiOptions(strict_fields=True))
    lines = [chat_line("good"), chat_line("odd", colour="red")]
    with (
        Live(config=strict) as live,
        openai.Client(base_url=f"{live.url}/v1", api_key="None", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="colour"):
            client.files.create(
                file=("in.jsonl", b"{}"), purpose="batch", extra_body={"colour": "red"}
            )
        assert client.files.list().data == []
        with pytest.raises(openai.BadRequestError, match="colour"):
            start(client, jsonl(lines), extra_body={"colour": "red"})
        assert client.batches.list().data == []
        batch = wait(client, start(client, jsonl(lines)))
        [answered] = lines_of(client, batch.output_file_id)
        [refused] = lines_of(client, batch.error_file_id)
    assert answered["custom_id"] == "good"
    assert refused["response"]["status_code"] == 400
    assert "--strict-fields" in refused["response"]["body"]["error"]["message"]
