"""/v1/files over HTTP: what is stored, listed and given back, and what is not."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.batches.harness import config
from tests.server.live import Live

from trunkline.engine.validation import RequestError
from trunkline.server.batches.upload import Upload, base_name

MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outer") / "storage"


@pytest.fixture(scope="module")
def live(root: Path) -> Iterator[Live]:
    with Live(config=config(root, max_file_bytes=MAX_BYTES)) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.Client]:
    with openai.Client(base_url=f"{live.url}/v1", api_key="None", max_retries=0) as client:
        for file in client.files.list():
            client.files.delete(file.id)
        yield client


def upload(live: Live, name: str = "a.jsonl", content: bytes = b"{}\n", **data: str) -> Any:
    response = live.http.post("/v1/files", files={"file": (name, content)}, data=data)
    assert response.status_code == 200, response.text
    return response.json()


def everything_below(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*")}


def test_a_file_comes_back_as_it_was(client: openai.Client, root: Path) -> None:
    content = os.urandom(70_000) + b"\r\n--\r\n\x00" + b"\n" * 999
    file = client.files.create(file=("näme.jsonl", content), purpose="batch")
    assert (file.object, file.purpose, file.bytes) == ("file", "batch", len(content))
    assert abs(file.created_at - time.time()) < 5
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert (root / "files" / file.id).read_bytes() == content
    assert client.files.delete(file.id).deleted
    assert everything_below(root) & {f"files/{file.id}"} == set()
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_purpose_is_batch_unless_said(live: Live) -> None:
    assert upload(live)["purpose"] == "batch"
    assert upload(live, purpose="user_data")["purpose"] == "user_data"
    bad = live.http.post("/v1/files", files={"file": b"x"}, data={"purpose": "nonsense"})
    assert bad.status_code == 400
    assert bad.json()["param"] == "purpose"


def test_unknown_form_fields_are_named(live: Live) -> None:
    response = live.http.post("/v1/files", files={"file": b"x"}, data={"colour": "red"})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "colour"


def test_lists_are_paged(client: openai.Client) -> None:
    ids = [client.files.create(file=b"x", purpose="batch").id for _ in range(7)]
    other = client.files.create(file=b"x", purpose="user_data").id
    assert [one.id for one in client.files.list()] == [other, *reversed(ids)]
    assert [one.id for one in client.files.list(order="asc", limit=3)] == [*ids, other]
    assert [one.id for one in client.files.list(purpose="batch", limit=2)] == ids[::-1]
    page = client.files.list(order="asc", after=ids[4], limit=2)
    assert ([one.id for one in page.data], page.has_more) == (ids[5:7], True)


def test_a_page_may_begin_after_a_deleted_file(client: openai.Client) -> None:
    for _ in range(5):
        client.files.create(file=b"x", purpose="batch")
    for file in client.files.list(limit=1):
        client.files.delete(file.id)
    assert client.files.list().data == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=99999", "order=up", "after=../x", "limit=٣"]
)
def test_a_bad_page_is_refused(live: Live, query: str) -> None:
    response = live.http.get(f"/v1/files?{query}")
    assert response.status_code == 400
    assert response.json()["param"] == query.partition("=")[0]


def test_what_is_too_large_is_refused_and_leaves_nothing(live: Live, root: Path) -> None:
    before = everything_below(root)
    assert upload(live, content=b"x" * MAX_BYTES)["bytes"] == MAX_BYTES
    for size in (MAX_BYTES + 1, MAX_BYTES + 70_000):
        response = live.http.post("/v1/files", files={"file": b"x" * size})
        assert response.status_code == 413
        assert "--max-file-bytes" in response.json()["message"]

    def endless() -> Iterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 10_000

    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert live.http.post("/v1/files", content=endless(), headers=headers).status_code == 413
    assert len(everything_below(root) - before) == 1


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=" + "b" * 300, b"x"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"garbage"),
        ("multipart/form-data; boundary=b", b"--b--\r\n"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\ncut off',
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n' * 2 + b"--b--\r\n",
        ),
        ("multipart/form-data; boundary=b", b"--b\r\na: b\r\n\r\nx\r\n" * 40 + b"--b--\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"a" * 100_000),
    ],
)
def test_malformed_forms(live: Live, root: Path, content_type: str, body: bytes) -> None:
    before = everything_below(root)
    response = live.http.post("/v1/files", content=body, headers={"content-type": content_type})
    assert response.status_code == 400, response.text
    assert everything_below(root) == before


HOSTILE = ["../../x.jsonl", "/etc/x", "..\\x", "a%2f..%2fb", "a\x00b", "n" * 5000, "..", ""]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_no_path(live: Live, root: Path, name: str) -> None:
    before = everything_below(root.parent)
    body = (
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="'
        + name.encode()
        + b'"\r\n\r\ncontent\r\n--b--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = live.http.post("/v1/files", content=body, headers=headers)
    assert response.status_code in (200, 400)
    new = everything_below(root.parent) - before
    if response.status_code == 200:
        file = response.json()
        assert new == {f"storage/files/{file['id']}"}
        assert not set("/\\\x00") & set(file["filename"])
        assert 0 < len(file["filename"]) <= 255
        assert file["filename"] not in (".", "..")
    else:
        assert new == set()


@settings(deadline=None)
@given(st.text())
def test_base_names(name: str) -> None:
    base = base_name(name)
    assert base.isprintable()
    assert 0 < len(base) <= 255
    assert not set("/\\") & set(base)
    assert base not in (".", "..")


@pytest.mark.parametrize("file_id", ["..%2f..%2fetc%2fpasswd", "..", "file-", "x" * 5000, "%00"])
def test_an_id_is_no_path(live: Live, file_id: str) -> None:
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/content")]:
        response = live.http.request(method, f"{live.url}/v1/files/{file_id}{path}")
        assert response.status_code in (404, 405), path
    body = {"input_file_id": "../x", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert live.post("/v1/batches", body).status_code == 404


def test_files_expire(live: Live, root: Path) -> None:
    kept = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = upload(live, **kept)
    assert file["expires_at"] == file["created_at"] + 3600
    with sqlite3.connect(root / "state.sqlite3") as database:
        database.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (file["id"],))
    database.close()
    assert live.http.get(f"/v1/files/{file['id']}").status_code == 404
    assert file["id"] not in live.http.get("/v1/files").text
    for wrong in ({"seconds": "3600"}, {"anchor": "created_at"}, {"anchor": "x", "seconds": "1"}):
        data = {f"expires_after[{name}]": value for name, value in wrong.items()}
        response = live.http.post("/v1/files", files={"file": b"x"}, data=data)
        assert response.status_code == 400, wrong


@settings(deadline=None)
@given(
    content=st.binary(max_size=300),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    tail=st.sampled_from([b"", b"\r\n--", b"\r\n--bound", b"\r", b"\n", b"\r\n"]),
)
def test_every_cutting_of_a_form_gives_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cuts: list[int], tail: bytes
) -> None:
    content += tail
    body = (
        b'--boundary\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--boundary\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n'
        b"content-type: text/plain\r\n\r\n" + content + b"\r\n--boundary--\r\n"
    )
    path = tmp_path_factory.mktemp("cut") / "file"
    with path.open("wb") as file:
        form = Upload("multipart/form-data; boundary=boundary", file, 1000)
        at = turn = 0
        while at < len(body):
            size = cuts[turn % len(cuts)]
            form.feed(body[at : at + size])
            at, turn = at + size, turn + 1
        form.finish()
    assert path.read_bytes() == content
    assert form.num_bytes == len(content)
    assert form.fields == {"purpose": b"batch"}


def test_a_form_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nxyz\r\n--b--'
    for length in range(len(whole)):
        with (tmp_path / "file").open("wb") as file:
            form = Upload("multipart/form-data; boundary=b", file, 1000)
            with pytest.raises(RequestError):  # noqa: PT012 (either step may find it)
                form.feed(whole[:length])
                form.finish()


def test_storage_that_cannot_be_used_is_a_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with Live() as server:
        (tmp_path / "file").write_text("no directory")
        batches = server.server.batches
        batches._storage.root = tmp_path / "file" / "below"
        response = server.http.get("/v1/files")
        assert response.status_code == 503
        assert "--file-storage-path" in response.json()["message"]


def test_nothing_is_made_until_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with Live() as server:
        assert list(tmp_path.iterdir()) == []
        upload(server)
        [made] = (tmp_path / "trunkline" / "storage").iterdir()
        assert made.name.startswith("model-")


def test_an_upload_that_breaks_off_leaves_nothing(live: Live, root: Path) -> None:
    upload(live)
    before = everything_below(root)
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n"
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(head + b"x" * 50_000)
        deadline = time.monotonic() + 10
        while everything_below(root) == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    while everything_below(root) != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_storage_that_is_locked_or_full_says_so(
    client: openai.Client, live: Live, root: Path
) -> None:
    file = client.files.create(file=b"x", purpose="batch")
    parts = live.server.batches._opened
    assert parts is not None

    async def shorten() -> None:
        await parts.database._writer.run(lambda one: one.execute("PRAGMA busy_timeout = 50"))

    asyncio.run_coroutine_threadsafe(shorten(), live.loop).result(5)
    with closing(sqlite3.connect(root / "state.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        response = live.http.delete(f"/v1/files/{file.id}")
        assert response.status_code == 503
        assert "locked" in response.json()["message"]
        assert client.files.retrieve(file.id) == file  # who reads does not wait
        other.execute("ROLLBACK")
    pages = "PRAGMA max_page_count = 1"

    async def fill() -> None:
        await parts.database._writer.run(lambda one: one.execute(pages).fetchall())

    asyncio.run_coroutine_threadsafe(fill(), live.loop).result(5)
    codes = [
        live.http.post("/v1/files", files={"file": ("n" * 250, b"x")}).status_code
        for _ in range(200)
    ]
    assert set(codes) == {200, 507}
    pages = "PRAGMA max_page_count = 1000000"
    asyncio.run_coroutine_threadsafe(fill(), live.loop).result(5)
    assert client.files.delete(file.id).deleted
