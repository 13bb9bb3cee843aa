"""`python -m trunkline` as a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

KEY = "SENTINEL-123"
ROOT = Path(__file__).parents[2]
READY = "The server is fired up and ready to roll!"


class Process:
    """A server process on a free port, smaller with a model of its own; collects its log lines."""

    def __init__(
        self, model: Path | None, *flags: str, environment: dict[str, str] | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        # The default model's pool would be 4 GiB, and be taken at once.
        sizes = ["--max-total-tokens", "2048" if model else "32768"]
        if model:
            sizes += ["--model-path", str(model)]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trunkline", "--port", str(self.port)),
                *("--max-prefill-tokens", "64", *sizes, *flags),
            ],
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=30,
            headers={"authorization": f"Bearer {KEY}"},
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines.extend(line.rstrip("\n") for line in iter(output.readline, ""))

    def wait_for(self, words: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not any(words in line for line in self.lines):
            assert time.monotonic() < deadline, "\n".join(self.lines)
            assert self.process.poll() is None, "\n".join(self.lines)
            time.sleep(0.02)

    @property
    def children(self) -> list[psutil.Process]:
        """The engine's process, if it runs."""
        return psutil.Process(self.process.pid).children()

    @property
    def descendants(self) -> list[psutil.Process]:
        """The engine's process and those that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, seconds: float = 30) -> int:
        """Wait for the exit; nothing may be left of it."""
        children = self.descendants if self.process.poll() is None else []
        code = self.process.wait(seconds)
        psutil.wait_procs(children, timeout=5)
        assert not any(child.is_running() for child in children)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", self.port))
        return code

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            for child in self.descendants:
                child.kill()
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
