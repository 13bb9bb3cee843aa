"""The largest input there may be, in bounded memory, with the event loop free."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import psutil
import pytest
from tests.server.batches.harness import add_batch, chat_line, ended, server_on
from tests.server.fake_engine import FakeEngine

from trunkline.engine import messages
from trunkline.server.batches.lines import MAX_LINES
from trunkline.server.config import BatchOptions

PAD = "x" * 3900
MOST_BYTES = 120 << 20  # beyond what the process has before; the input alone has more


class Forgetful(FakeEngine):
    """Keeps no list of what it was asked, and answers at once."""

    def _submit(self, submit: messages.Submit) -> None:
        super()._submit(submit)
        self.submitted.clear()


class Watch:
    """The most memory that this process has had, measured beside it."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._base = self._process.memory_info().rss
        self._stop = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.most = max(self.most, self._process.memory_info().rss - self._base)


@pytest.mark.slow
def test_fifty_thousand_lines_and_two_hundred_megabytes(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Forgetful(answer=lambda prompt, sample: "ok")
        async with server_on(tmp_path / "storage", engine, batch_concurrency=64) as server:
            parts = await server.batches.opened()
            await ended(server, await add_batch(server, b"{}\n"))  # what is loaded late, is
            input_path = tmp_path / "input.jsonl"
            with input_path.open("wb") as file:
                for n in range(MAX_LINES):
                    line = chat_line(f"id-{n}", user=PAD, max_tokens=2)
                    file.write(json.dumps(line).encode() + b"\n")
            size = input_path.stat().st_size
            assert 0.95 * BatchOptions().max_file_bytes < size <= BatchOptions().max_file_bytes
            with Watch() as watch:
                batch_id = await add_batch(server, input_path, window_s=36000)
                batch = await ended(server, batch_id, 1500)
            assert (batch.status, batch.completed, batch.failed) == ("completed", MAX_LINES, 0)
            assert watch.most < MOST_BYTES
            _, output = await parts.files.open(batch.output_file_id or "")
            with output:
                for n, text in enumerate(output):
                    assert json.loads(text)["custom_id"] == f"id-{n}"

    asyncio.run(main())
