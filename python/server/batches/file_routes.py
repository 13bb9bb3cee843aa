"""/v1/files: upload, list, retrieve, content, delete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import BinaryIO, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from trunkline.server.answer import ignored_headers
from trunkline.server.batches.files import is_file_id, new_file_id
from trunkline.server.batches.records import FileRecord, parse_page, shown_page
from trunkline.server.batches.service import opened
from trunkline.server.batches.upload import parse_expiry, parse_purpose, receive
from trunkline.server.http import json_response
from trunkline.server.state import server_of

DEFAULT_LIMIT: Final = 10_000
_PIECE_BYTES: Final = 256 << 10


async def create_file(request: Request) -> Response:
    """Store an upload; the answer goes out when it is on disk."""
    files, server = (await opened(request)).files, server_of(request)
    with files.storage.incoming() as path:
        upload = await receive(request, path, server.config.batches.max_file_bytes)
        server.note_ignored(upload.ignored)
        now, kept_s = int(time.time()), parse_expiry(upload.fields)
        assert upload.filename is not None, "a finished form has a file"
        one = FileRecord(
            id=new_file_id(),
            filename=upload.filename,
            purpose=parse_purpose(upload.fields),
            bytes=upload.num_bytes,
            created_at=now,
            expires_at=None if kept_s is None else now + kept_s,
        )
        await files.add(path, one)
    return json_response(one.shown(), headers=ignored_headers(upload.ignored))


async def list_files(request: Request) -> Response:
    """A page of the files, newest first unless asked otherwise."""
    query = request.query_params
    page = parse_page(query, default=DEFAULT_LIMIT, most=DEFAULT_LIMIT, is_id=is_file_id)
    records, has_more = await (await opened(request)).files.page(page, query.get("purpose"))
    return json_response(shown_page([one.shown() for one in records], has_more))


async def get_file(request: Request) -> Response:
    """One file."""
    files = (await opened(request)).files
    return json_response((await files.get(request.path_params["file_id"])).shown())


async def get_content(request: Request) -> Response:
    """The contents of a file, as they were uploaded or written."""
    files = (await opened(request)).files
    one, contents = await files.open(request.path_params["file_id"])
    headers = {"content-length": str(one.bytes)}
    return StreamingResponse(
        _pieces(contents), headers=headers, media_type="application/octet-stream"
    )


async def _pieces(contents: BinaryIO) -> AsyncIterator[bytes]:
    with contents:
        while piece := await asyncio.to_thread(contents.read, _PIECE_BYTES):
            yield piece


async def delete_file(request: Request) -> Response:
    """Delete a file."""
    file_id = request.path_params["file_id"]
    await (await opened(request)).files.delete(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})
