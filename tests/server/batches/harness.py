"""A server's batches without HTTP, over a fake engine, and the inputs that tests give it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from tests.server.fake_engine import FakeEngine
from tests.server.live import fake_app

from trunkline.engine.client import Client
from trunkline.server.batches.database import new_id
from trunkline.server.batches.files import new_file_id
from trunkline.server.batches.records import UNFINISHED, BatchRecord, FileRecord
from trunkline.server.config import BatchOptions, ServerConfig
from trunkline.server.state import Server

CHAT = "/v1/chat/completions"


def chat_line(custom_id: str, content: str = "hi", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "default", "messages": messages, **body},
    }


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def config(root: Path, **options: Any) -> ServerConfig:
    return ServerConfig(batches=BatchOptions(file_storage_path=str(root), **options))


@contextlib.asynccontextmanager
async def server_on(
    root: Path, engine: FakeEngine | None = None, **options: Any
) -> AsyncIterator[Server]:
    client = Client(engine or FakeEngine())
    await client.start()
    server: Server = fake_app(client, config(root, **options)).state.server
    try:
        await server.batches.start()
        yield server
    finally:
        await server.batches.close()
        await client.close()


async def add_batch(
    server: Server, content: bytes | Path, endpoint: str = CHAT, window_s: int = 3600
) -> str:
    """Store an input and a batch as the endpoints would; the batch's id."""
    parts = await server.batches.opened()
    now = int(time.time())
    with parts.files.storage.incoming() as path:
        if isinstance(content, Path):
            content.rename(path)
        else:
            path.write_bytes(content)
        file = FileRecord(
            id=new_file_id(),
            filename="input.jsonl",
            purpose="batch",
            bytes=path.stat().st_size,
            created_at=now,
        )
        await parts.files.add(path, file)
    batch = BatchRecord(
        id=new_id("batch_"),
        endpoint=endpoint,
        input_file_id=file.id,
        completion_window="1h",
        metadata="null",
        output_expires_after_s=None,
        created_at=now,
        expires_at=now + window_s,
    )
    await parts.store.create(batch)
    parts.worker.wake()
    return batch.id


async def ended(server: Server, batch_id: str, seconds: float = 20) -> BatchRecord:
    """The batch, once it is at its end."""
    parts = await server.batches.opened()
    async with asyncio.timeout(seconds):
        while (batch := await parts.store.get(batch_id)).status in UNFINISHED:
            await asyncio.sleep(0.005)
    return batch


async def content_of(server: Server, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none if there is no such file."""
    if file_id is None:
        return []
    _, file = await (await server.batches.opened()).files.open(file_id)
    with file:
        return [json.loads(line) for line in file]


async def check_answers(
    server: Server, batch: BatchRecord, custom_ids: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every line is answered once, in order, and the counts say so; output and error lines."""
    output = await content_of(server, batch.output_file_id)
    error = await content_of(server, batch.error_file_id)
    places = {custom_id: place for place, custom_id in enumerate(custom_ids)}
    for lines in (output, error):
        order = [places[line["custom_id"]] for line in lines]
        assert order == sorted(order)
    assert sorted(places[line["custom_id"]] for line in output + error) == sorted(places.values())
    assert (batch.completed, batch.failed) == (len(output), len(error))
    assert batch.total == len(custom_ids)
    return output, error
