"""Batches over several engines."""

from __future__ import annotations

import time
from pathlib import Path

import openai
from tests.server.batches.harness import chat_line, config, jsonl
from tests.server.batches.test_batches import start, wait, wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live

from trunkline.engine.client import Request, Stream


def test_a_line_waits_quietly_for_the_rank_that_it_names(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    settings = config(tmp_path / "storage", batch_concurrency=4)
    with (
        Live(engines[0], settings, more_engines=engines[1:]) as live,
        openai.Client(base_url=f"{live.url}/v1", api_key="None", max_retries=0) as client,
    ):
        pinned: list[Request] = []
        submit = live.server.client.submit

        def counted(request: Request) -> Stream:
            if request.dp_rank == 0:
                pinned.append(request)
            return submit(request)

        live.server.client.submit = counted  # type: ignore[method-assign, assignment]
        live.call(engines[0].kill)
        lines = [chat_line("a", data_parallel_rank=0), chat_line("b"), chat_line("c")]
        batch = start(client, jsonl(lines))

        def others_are_done() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed == 2

        wait_until(others_are_done)
        time.sleep(0.3)
        assert len(pinned) == 1
        live.call(engines[0].restart)
        batch = wait(client, batch)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)
        assert [len(pinned), len(engines[0].submitted)] == [2, 1]
