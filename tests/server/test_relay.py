"""What an API worker hands on to the first process, on the wire."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trunkline.server.api_workers.relay import Relay, Relayed
from trunkline.server.config import HttpOptions
from trunkline.server.connections import listen

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(request: Request) -> Response:
    body = await request.body()
    lines = [f"{request.method} {request.url.path}?{request.url.query}", str(len(body))]
    headers = {"x-request-id": "one"}
    if request.client is not None:
        headers["x-client"] = f"{request.client.host} {request.client.port}"
    return PlainTextResponse("\n".join(lines), headers=headers)


async def refuse(request: Request) -> Response:
    return PlainTextResponse("too large", 413)


async def stream(request: Request) -> Response:
    async def parts():
        for number in range(3):
            yield f"data: {number}\n\n"

    return StreamingResponse(parts(), media_type="text/event-stream")


FIRST = Starlette(
    routes=[
        Route("/v1/files", echo, methods=["GET", "POST", "DELETE", "OPTIONS"]),
        Route("/v1/files/refuse", refuse, methods=["POST"]),
        Route("/v1/responses", stream, methods=["POST"]),
    ]
)


def talk(directory: Path, conversation: Talk) -> None:
    """Have a conversation with a worker whose first process is `FIRST`."""

    async def main() -> None:
        path = str(directory / "http")
        first = socket.socket(socket.AF_UNIX)
        first.bind(path)
        worker = socket.socket()
        worker.bind(("127.0.0.1", 0))
        stop = asyncio.Event()
        servers = [
            asyncio.create_task(listen(app, listener, HttpOptions(), stop))
            for app, listener in ((Relayed(FIRST), first), (Relay(Starlette(), path), worker))
        ]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection(*worker.getsockname())
        try:
            await asyncio.wait_for(conversation(reader, writer), 20)
        finally:
            writer.close()
            stop.set()
            await asyncio.gather(*servers)

    asyncio.run(main())


async def head(reader: asyncio.StreamReader) -> list[str]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    return [line.lower() for line in lines if line]


def named(lines: list[str], name: str) -> list[str]:
    return [line.partition(": ")[2] for line in lines if line.startswith(name + ":")]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_one_connection_serves_many_requests_and_headers_come_once(
    tmp_path: Path, method: str
) -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3):
            writer.write(f"{method} /v1/files?n={number} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            lines = await head(reader)
            assert lines[0].startswith("http/1.1 200")
            assert len(named(lines, "date")) == 1
            assert named(lines, "x-request-id") == ["one"]
            assert named(lines, "connection") == []
            body = f"{method} /v1/files?n={number}\n0".encode()
            assert named(lines, "content-length") == [str(len(body))]
            if method != "HEAD":
                assert await reader.readexactly(len(body)) == body

    talk(tmp_path, conversation)


def test_large_bodies_and_streams_pass(tmp_path: Path) -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = 3 << 20
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % size)
        assert (await head(reader))[0].startswith("http/1.1 100")
        writer.write(bytes(size))
        lines = await head(reader)
        (length,) = named(lines, "content-length")
        assert (await reader.readexactly(int(length))).endswith(b"\n%d" % size)
        writer.write(
            b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(b"2\r\n{}\r\n0\r\n\r\n")
        lines = await head(reader)
        assert named(lines, "transfer-encoding") == ["chunked"]
        body = await reader.readuntil(b"0\r\n\r\n")
        assert [b"data: %d" % number in body for number in range(4)] == [True] * 3 + [False]

    talk(tmp_path, conversation)


@pytest.mark.parametrize("sent", [0, 1 << 20])
def test_an_answer_before_the_end_of_the_body_says_that_the_connection_ends(
    tmp_path: Path, sent: int
) -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /v1/files/refuse HTTP/1.1\r\nHost: x\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % (8 << 20))
        writer.write(bytes(sent))
        lines = await head(reader)
        assert lines[0].startswith("http/1.1 413")
        assert named(lines, "connection") == ["close"]
        assert await reader.readexactly(9) == b"too large"
        assert await reader.read() == b""

    talk(tmp_path, conversation)


def test_the_first_process_sees_whose_request_it_is(tmp_path: Path) -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("sockname")
        writer.write(b"GET /v1/files HTTP/1.1\r\nHost: x\r\nTrunkline-Client: 1.2.3.4 5\r\n\r\n")
        assert named(await head(reader), "x-client") == [f"{host} {port}"]

    talk(tmp_path, conversation)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("parts", [[], [b"ab", b"cde"]])
def test_bodies_of_http_2_need_no_length(tmp_path: Path, method: str, parts: list[bytes]) -> None:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")
        url = f"http://{host}:{port}/v1/files"
        async with httpx.AsyncClient(http1=False, http2=True) as client:
            answer = await client.request(method, url, content=body())
        assert answer.http_version == "HTTP/2"
        assert answer.status_code == 200
        assert answer.text == f"{method} /v1/files?\n{sum(map(len, parts))}"

    talk(tmp_path, conversation)


def test_an_early_answer_leaves_an_http_2_connection_whole(tmp_path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 16)

    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")
        url = f"http://{host}:{port}/v1/files"
        async with httpx.AsyncClient(http1=False, http2=True) as client:
            refused = await client.post(f"{url}/refuse", content=body())
            assert (refused.status_code, refused.text) == (413, "too large")
            assert (await client.get(url)).status_code == 200

    talk(tmp_path, conversation)
