"""What does HTTP cost? Streams from an engine without a model, through the whole server.

The engine (`paced_engine.py`) emits a token per stream at fixed points of the clock, and each token
tells when it was made. Measured are the processor time of the server's HTTP process (not the
engine's, not the load generator's), and how late each token reaches the client. Two runs: all
streams, for tokens per second and core; half of them, for latency.

    python bench/http_cost.py [--streams 64] [--rate 200] [--seconds 10] [--json out.json]

Another server, whose engine emits letters in the same way, is measured with `--url` and `--pid`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import uvloop

ROOT = Path(__file__).parents[1]
CONTENT = re.compile(rb'"content": ?"([a-z]+)"')
LETTERS = 26
WARMUP_S = 2.0


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Latency is from the moment that a token was made to that in which it was read."""

    streams: int
    offered_tokens_per_s: float
    delivered_tokens_per_s: float
    server_cores: float
    tokens_per_s_per_core: float
    latency_p50_ms: float
    latency_p99_ms: float
    events_per_token: float


class Load:
    """Streams that run until they are cancelled; counts what comes between `begin` and `end`."""

    def __init__(self, url: str, model: str, rate: float) -> None:
        """Make a load for a server whose engine ticks `rate` times a second."""
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._model = model
        self._rate = rate
        self._is_counting = False
        self.latencies: list[float] = []
        self.events = 0

    def begin(self) -> None:
        """Count from now on."""
        self._is_counting = True

    def end(self) -> None:
        """Count no more."""
        self._is_counting = False

    async def stream(self, number: int) -> None:
        """One chat after another, read as the bytes come."""
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": f"Say letters, {number}"}],
                "max_tokens": 4000,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address[0]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        while True:
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                writer.write(head.encode() + body)
                status = await reader.readline()
                if b" 200 " not in status:
                    raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
                await self._read(reader)
            finally:
                writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while b"[DONE]" not in rest:
            data = await reader.read(1 << 16)
            if not data:
                return
            now = time.monotonic()
            whole, _, rest = (rest + data).rpartition(b"\n\n")
            if self._is_counting:
                for match in CONTENT.finditer(whole):
                    self._note(match[1], now)

    def _note(self, letters: bytes, now: float) -> None:
        self.events += 1
        latest = int(now * self._rate)
        for letter in letters:
            ago = (latest - (letter - ord("a"))) % LETTERS
            self.latencies.append(now - (latest - ago) / self._rate)


async def measure(url: str, pid: int, streams: int, options: argparse.Namespace) -> Result:
    """One run against a server whose HTTP process is `pid`."""
    load = Load(url, options.model, options.rate)
    process = psutil.Process(pid)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.stream(number)) for number in range(streams)]
        await asyncio.sleep(WARMUP_S)
        load.begin()
        before, started_at = sum(process.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(options.seconds)
        elapsed, used = time.monotonic() - started_at, sum(process.cpu_times()[:2]) - before
        load.end()
        for task in tasks:
            task.cancel()
    latencies = sorted(load.latencies)
    tokens = len(latencies)
    return Result(
        streams=streams,
        offered_tokens_per_s=streams * options.rate,
        delivered_tokens_per_s=tokens / elapsed,
        server_cores=used / elapsed,
        tokens_per_s_per_core=tokens / used,
        latency_p50_ms=1e3 * latencies[tokens // 2],
        latency_p99_ms=1e3 * latencies[int(tokens * 0.99)],
        events_per_token=load.events / tokens,
    )


@contextlib.contextmanager
def own_server(rate: float) -> Iterator[tuple[str, int]]:
    """A server of ours over the paced engine: its address and the id of its HTTP process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PACED_RATE": str(rate)}
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(port)], env=environment, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        yield url, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def serve(port: int) -> None:
    """Be the server."""
    from trunkline.server.arguments import parse_arguments
    from trunkline.server.cli import with_random_seed
    from trunkline.server.serve import run

    config, _ = parse_arguments(
        ["--port", str(port), "--shutdown-grace-s", "1", "--log-level", "warning"]
    )
    config = with_random_seed(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(config, "bench.paced_engine"))


def report(url: str, pid: int, options: argparse.Namespace) -> None:
    """Both runs, as a table and if wanted as JSON."""
    results = []
    for streams in (options.streams, options.streams // 2):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results.append(runner.run(measure(url, pid, streams, options)))
    print(f"load average {os.getloadavg()[0]:.1f}, {options.seconds} s per run")
    print(
        "| streams | offered tok/s | delivered tok/s | cores | tok/s per core | p50 ms | p99 ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for one in results:
        print(
            f"| {one.streams} | {one.offered_tokens_per_s:.0f} | {one.delivered_tokens_per_s:.0f} "
            f"| {one.server_cores:.2f} | {one.tokens_per_s_per_core:.0f} "
            f"| {one.events_per_token:.2f} "
            f"| {one.latency_p50_ms:.2f} | {one.latency_p99_ms:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))


def main() -> None:
    """Measure our server, or the one that is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=200, help="tokens per second and stream")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--model", default="default")
    parser.add_argument("--url", help="another server, whose engine emits letters at this rate")
    parser.add_argument("--pid", type=int, help="the HTTP process of that server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
    elif options.url is not None:
        report(options.url, options.pid, options)
    else:
        with own_server(options.rate) as (url, pid):
            report(url, pid, options)


if __name__ == "__main__":
    main()
