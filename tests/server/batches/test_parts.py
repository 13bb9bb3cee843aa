"""Gate, line reader and list pages against naive models."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.server.batches.answers import unanswered
from trunkline.server.batches.batch_routes import window_s
from trunkline.server.batches.gate import Gate
from trunkline.server.batches.lines import Line, raw_lines
from trunkline.server.batches.records import PageQuery, select_page


@settings(deadline=None)
@given(
    content=st.lists(
        st.sampled_from([b"a", b"bb", b"\n", b"\r\n", b" ", b"\xef\xbb\xbf", b"x" * 9])
    ),
    most=st.integers(1, 12),
)
def test_lines_are_those_of_the_file(content: list[bytes], most: int) -> None:
    text = b"".join(content)
    expected: list[tuple[int, bytes | None]] = []
    for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if len(line) > most:
            expected.append((number, None))
        elif line.strip():
            expected.append((number, line.strip()))
    got = [
        (raw.number, None if raw.text is None else raw.text.strip())
        for raw in raw_lines(io.BytesIO(text), most)
    ]
    assert got == expected


@settings(deadline=None)
@given(
    weights=st.lists(st.one_of(st.integers(1, 6), st.just(1 << 30)), max_size=20),
    dropped=st.sets(st.integers(0, 19)),
    limit=st.integers(1, 5),
)
def test_the_gate_keeps_order_and_bound(weights: list[int], dropped: set[int], limit: int) -> None:
    async def main() -> None:
        gate = Gate(lambda: limit)
        inside: dict[int, int] = {}
        entered: list[int] = []

        async def visit(number: int, weight: int) -> None:
            await gate.acquire(weight)
            try:
                inside[number] = weight
                entered.append(number)
                total = sum(inside.values())
                assert total <= limit or len(inside) == 1
                assert gate.in_flight >= total  # some may be let in and not awake yet
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            finally:
                del inside[number]
                gate.release(weight)

        tasks = [asyncio.create_task(visit(*one)) for one in enumerate(weights)]
        await asyncio.sleep(0)
        for number in dropped:
            if number < len(tasks):
                tasks[number].cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
        assert gate.in_flight == 0
        assert entered == sorted(entered)
        assert set(entered) >= set(range(len(weights))) - dropped

    asyncio.run(main())


@settings(deadline=None)
@given(
    count=st.integers(0, 12),
    limit=st.integers(1, 5),
    ascending=st.booleans(),
    gone=st.sets(st.integers(0, 11)),
)
def test_pages_go_over_everything_once(
    count: int, limit: int, ascending: bool, gone: set[int]
) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("CREATE TABLE things (id TEXT PRIMARY KEY)")
        ids = [f"thing-{n:02}" for n in range(count)]
        connection.executemany("INSERT INTO things VALUES (?)", [(one,) for one in ids])
        seen: list[str] = []
        after: str | None = None
        while True:
            page = PageQuery(after=after, limit=limit, ascending=ascending)
            rows, has_more = select_page(connection, "things", page)
            assert len(rows) <= limit
            seen += [row["id"] for row in rows]
            if not has_more:
                break
            after = seen[-1]
            for number in gone:  # what has been seen may be deleted meanwhile
                if f"thing-{number:02}" in seen:
                    connection.execute("DELETE FROM things WHERE id = ?", (f"thing-{number:02}",))
        assert seen == (ids if ascending else ids[::-1])


@pytest.mark.parametrize(
    ("text", "seconds"), [("24h", 86400), ("30d", 2592000), ("90m", 5400), ("1s", 1)]
)
def test_completion_windows(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


def test_an_entry_is_one_line_for_readers_that_split_at_every_line_break():
    name = "a\x85b\u2028c\u2029d\\\x85é"
    line = Line(number=1, custom_id=name, body={}, num_bytes=1)
    entry = unanswered("batch_1", line, "expired").text.decode()
    assert entry.splitlines() == [entry]
    assert json.loads(entry)["custom_id"] == name
