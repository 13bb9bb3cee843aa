"""The file that says what a dead engine was running."""

from __future__ import annotations

from pathlib import Path

import pytest

from trunkline.engine import entries
from trunkline.engine.entries import Begun, EntryWriter, read_entries


def keys(path: Path, client: int) -> frozenset[int]:
    return read_entries(path, client, 1).keys


def test_each_client_finds_its_own(tmp_path: Path) -> None:
    path = tmp_path / "entries"
    assert keys(path, 1) == frozenset()
    writer = EntryWriter(path, 1)
    assert keys(path, 1) == frozenset()
    writer.add([(1, 7), (2, 8)])
    writer.add([(1, 2**63)])
    assert keys(path, 1) == {7, 2**63}
    assert keys(path, 2) == {8}
    writer.close()


def test_old_ones_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "entries"
    writer = EntryWriter(path, 1)
    writer.add((1, key) for key in range(1, entries.CAPACITY + 4))
    assert keys(path, 1) == set(range(4, entries.CAPACITY + 4))
    writer.close()
    again = EntryWriter(path, 1)
    again.add([(1, 10**9)])
    assert 10**9 in keys(path, 1)
    again.close()


def test_others_are_seen_in_the_life_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "entries"
    for epoch, client in ((1, 1), (2, 2), (3, 1)):
        writer = EntryWriter(path, epoch)
        assert not read_entries(path, 1, epoch).others
        # Each life begins at the file's beginning; the first is told apart all the same.
        writer.add([(client, 10 * epoch + place) for place in range(4 - epoch)])
        assert read_entries(path, 1, epoch).others == (client != 1)
        assert read_entries(path, 2, epoch).others == (client != 2)
        writer.close()
    assert read_entries(path, 1, 4) == Begun(frozenset({12, 30}))


def test_a_torn_entry_is_none(tmp_path: Path) -> None:
    path = tmp_path / "entries"
    writer = EntryWriter(path, 1)
    writer.add([(1, 5)])
    writer.close()
    with path.open("ab") as file:
        file.write(b"torn")
    assert keys(path, 1) == {5}


def test_room_is_taken_at_the_start_and_suffices(tmp_path: Path) -> None:
    path = tmp_path / "entries"
    for _ in range(2):
        writer = EntryWriter(path, 1)
        blocks = path.stat().st_blocks
        writer.add((1, key) for key in range(1, entries.CAPACITY + 10))
        assert path.stat().st_blocks == blocks > 0
        writer.close()
    with pytest.raises(OSError, match="No space left"):
        EntryWriter(Path("/dev/full"), 1)
