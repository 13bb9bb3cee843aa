"""Directories of engines go with their owners, and no other goes with them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from trunkline.engine.runtime_directory import PREFIX, RuntimeDirectory

OWNER = """
import sys, time
from trunkline.engine.runtime_directory import RuntimeDirectory
directory = RuntimeDirectory(sys.argv[1])
print(directory.path, flush=True)
time.sleep(60)
"""


def test_what_the_killed_left_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        (path / "engine").touch()
        unfinished = tmp_path / f"{PREFIX}without-an-owner-yet"
        unfinished.mkdir()
        mine = RuntimeDirectory(str(tmp_path))
        assert path.exists(), "its owner lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
    other = RuntimeDirectory(str(tmp_path))
    assert not path.exists()
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, other.path, unfinished])
    for directory in (mine, other):
        directory.close()
        directory.close()
    assert list(tmp_path.iterdir()) == [unfinished]
