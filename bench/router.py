"""What does a router cost? Requests per second, CPU per request, added latency, memory.

Two mock workers and the clients are Rust (`rust/router/examples/bench_peer.rs`), so that neither is
the bottleneck; each router runs alone, with its cache-aware policy, on the same machine and load.
Rows: `json` small answers, `stream` events a few milliseconds apart, `distinct` prompts that share
nothing (what memory they take). `direct` is the same load without a router: latency is added to it.

    cargo build --release -p router --example bench_peer
    python -m venv V && V/bin/pip install sglang-router vllm-router
    python bench/router.py --peers V [--seconds 10] [--repeats 3] [--json out.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVENTS, GAP_MS = 32, 5
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Workload:
    """How clients ask. `groups` 0: every prompt is new."""

    name: str
    kind: str
    connections: int
    groups: int
    prompt_bytes: int


WORKLOADS = (
    Workload("json", "json", 32, 64, 1_000),
    Workload("latency", "json", 1, 64, 1_000),
    Workload("stream", "stream", 64, 64, 1_000),
    Workload("distinct", "json", 32, 0, 1_000),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The median of the repeats."""

    router: str
    workload: str
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    first_byte_p50_ms: float
    cpu_ms_per_request: float
    memory_mib: float
    errors: int


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, seconds: float = 60) -> None:
    """Wait until a GET is answered with 200."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        if time.monotonic() > end:
            raise SystemExit(f"{url} does not answer")
        time.sleep(0.1)


@contextlib.contextmanager
def process(command: list[str], ready: str) -> Iterator[int]:
    """A child process that answers at `ready`; its id."""
    environment = os.environ | {"RUST_LOG": "error"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as child:
        try:
            wait_for(ready)
            yield child.pid
        finally:
            child.kill()


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds of a process and its children so far, and their memory in MiB."""
    seconds = memory = 0.0
    for one in [pid, *children(pid)]:
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return seconds, memory


def children(pid: int) -> list[int]:
    """Ids of the processes that it started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def command_of(router: str, port: int, workers: list[str], peers: Path | None) -> list[str]:
    """How a router is started."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    common = [*address, "--policy", "cache_aware", "--worker-urls", *workers]
    if router == "engine-router":
        return [
            sys.executable,
            "-m",
            "trunkline.server.router.cli",
            *address,
            "--worker-urls",
            *workers,
        ]
    assert peers is not None
    metrics = ["--prometheus-port", str(free_port())]
    if router == "sglang-router":
        python = str(peers / "bin" / "python")
        return [python, "-m", "sglang_router.launch_router", *common, *metrics]
    return [str(peers / "bin" / "vllm-router"), *common, *metrics]


def measure(peer: str, url: str, workload: Workload, seconds: int, pid: int | None) -> dict:
    """One run of a workload; CPU and memory are those of process `pid`."""
    before = usage(pid)[0] if pid else 0.0
    words = [workload.connections, seconds, workload.groups, workload.prompt_bytes, workload.kind]
    command = [peer, "load", f"{url}/v1/chat/completions", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    after, memory = usage(pid) if pid else (0.0, 0.0)
    result["cpu_ms_per_request"] = 1e3 * (after - before) / max(result["requests"], 1)
    result["memory_mib"] = memory
    return result


def rows(router: str, url: str, pid: int | None, options: argparse.Namespace) -> Iterator[Row]:
    """All workloads on one router, or on a worker."""
    for workload in WORKLOADS:
        if workload.name not in options.workloads:
            continue
        measure(options.peer, url, workload, 1, pid)
        runs = [
            measure(options.peer, url, workload, options.seconds, pid)
            for _ in range(options.repeats)
        ]
        figures = {
            name: statistics.median(run[name] for run in runs)
            for name in Row.__dataclass_fields__
            if name in runs[0] and name != "errors"
        }
        yield Row(router, workload.name, errors=sum(run["errors"] for run in runs), **figures)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="virtual environment with the other routers")
    parser.add_argument("--routers", nargs="*", help="which; default: all that are there")
    parser.add_argument("--workloads", nargs="*", default=[one.name for one in WORKLOADS])
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser.add_argument("--peer", default=str(target / "release" / "examples" / "bench_peer"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not Path(options.peer).exists():
        parser.error("build it first: cargo build --release -p router --example bench_peer")
    if not options.routers:
        others = ["sglang-router", "vllm-router"] if options.peers else []
        options.routers = ["engine-router", *others]
    return options


def main() -> None:
    """Measure, print a table, write JSON."""
    options = arguments()
    ports = [free_port(), free_port()]
    workers = [f"http://127.0.0.1:{port}" for port in ports]
    table: list[Row] = []
    with contextlib.ExitStack() as stack:
        for port, url in zip(ports, workers, strict=True):
            command = [options.peer, "worker", str(port), str(EVENTS), str(GAP_MS)]
            stack.enter_context(process(command, f"{url}/health"))
        table += rows("direct", workers[0], None, options)
        for router in options.routers:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = command_of(router, port, workers, options.peers)
            with process(command, f"{url}/health") as pid:
                wait_for(f"{url}/v1/models")
                table += rows(router, url, pid, options)
    print(
        f"{'router':14} {'load':9} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms':>8} "
        f"{'MiB':>7} errors"
    )
    for row in table:
        print(
            f"{row.router:14} {row.workload:9} {row.requests_per_s:8.0f} {row.p50_ms:8.3f} "
            f"{row.p99_ms:8.3f} {row.cpu_ms_per_request:8.3f} {row.memory_mib:7.1f} "
            f"{row.errors}"
        )
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({**machine, "rows": [asdict(row) for row in table]}, indent=1)
        options.json.write_text(text)


if __name__ == "__main__":
    main()
