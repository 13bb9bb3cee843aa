"""The output and error files of a batch, from its stored answers, in the order of the lines."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from trunkline.server.batches.files import FileStore, new_file_id
from trunkline.server.batches.records import OUTPUT_PURPOSE, BatchRecord, FileRecord
from trunkline.server.batches.results import Results


async def write_files(
    batch: BatchRecord, files: FileStore, results: Results
) -> tuple[FileRecord | None, FileRecord | None]:
    """Put the contents of a concluded batch's files on disk; the records to list them as.

    A file without a line is None. What is never listed is swept up later, so that it is safe to be
    killed here and to begin again.
    """
    storage = files.storage
    with storage.incoming() as output_path, storage.incoming() as error_path:
        sizes = await _write(batch.id, results, (output_path, error_path))
        return (
            await _publish(batch, files, output_path, sizes[0], "output"),
            await _publish(batch, files, error_path, sizes[1], "error"),
        )


async def _write(batch_id: str, results: Results, paths: tuple[Path, Path]) -> tuple[int, int]:
    """Write the answers, errors to the second path; the bytes of each."""
    last = 0
    with paths[0].open("xb") as output, paths[1].open("xb") as error:
        while rows := await results.page(batch_id, last):
            texts = [
                b"".join(text + b"\n" for _, is_error, text in rows if is_error is kind)
                for kind in (False, True)
            ]
            await asyncio.to_thread(output.write, texts[0])
            await asyncio.to_thread(error.write, texts[1])
            last = rows[-1][0]
        return output.tell(), error.tell()


async def _publish(
    batch: BatchRecord, files: FileStore, path: Path, num_bytes: int, kind: str
) -> FileRecord | None:
    if num_bytes == 0:
        return None
    file_id, now = new_file_id(), int(time.time())
    await asyncio.to_thread(files.storage.publish, path, file_id)
    kept_s = batch.output_expires_after_s
    return FileRecord(
        id=file_id,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=OUTPUT_PURPOSE,
        bytes=num_bytes,
        created_at=now,
        expires_at=None if kept_s is None else now + kept_s,
    )
