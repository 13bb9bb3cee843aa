r"""Which engine serves a small model fastest on a CPU? Ours and its peers, in the same run.

Every workload of `workloads.py` is run against each engine in turn, repetition by repetition, so
that all meet the same weather; those that are not measured are stopped by signal. Beside each
figure stand what the machine gave at that moment: the rate at which memory is merely read, the peak
of bfloat16 matrix products (our kernels, no model), and the load average.

    python bench/cpu_models.py ...      # once: the models (see there)
    P="--models models --state servers.json --engines ours,llama.cpp,vllm,openvino
       --llama-server build/bin/llama-server --vllm-python vllm/bin/python
       --openvino-python openvino/bin/python"
    python bench/cpu_serving.py start $P
    python bench/cpu_serving.py run $P --workloads W1,W2,W3,W4,W5 --repetitions 3 \
        --append cpu.jsonl [--stop-after 240]
    python bench/cpu_serving.py stop --state servers.json
    python bench/cpu_serving.py report --append cpu.jsonl [--plot docs/figures/cpu_concurrency.svg]

`run` skips what the file holds already (but for runs in which other processes took more than a
twelfth of the machine, which count for nothing): repeat it until it says that nothing is left. It
starts (and then stops) engines that the state does not name. One engine's workload is never cut.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from cpu_engines import ENGINES, SERVED_NAME, Server, Setup, read_state, start, write_state
from cpu_tables import is_disturbed, print_report
from serving import HttpTransport, run
from workloads import WORKLOADS, Words, measure, warm_up

from trunkline.kernels.cpu.native import CpuLinearBench

Json = dict[str, Any]
PEAK_ROWS = 256
# The linears of a small model (269 MB in bfloat16): more than any cache.
PROBE_SHAPES = [*[(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30, (49_152, 576)]


class Machine:
    """Tells what the hardware gives at this moment."""

    def __init__(self, threads: int) -> None:
        """Allocate what is read and multiplied."""
        self._bench = CpuLinearBench("bfloat16", PROBE_SHAPES, None, threads)

    def probe(self) -> Json:
        """Rates of this moment."""
        size = self._bench.num_bytes
        read = statistics.median(self._bench.streaming_read() for _ in range(7))
        peak = min(self._bench.linears(PEAK_ROWS) for _ in range(3))
        return {
            "read_gb_per_s": size / read / 1e9,
            "peak_gflop_per_s": size * PEAK_ROWS / peak / 1e9,
            "load_average": os.getloadavg()[0],
        }


class Usage:
    """Processor time from its making on: the server's processes, this one, and all others."""

    def __init__(self, server: Server) -> None:
        """Begin to count."""
        self._server = server
        self._start = time.perf_counter()
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        machine = psutil.cpu_times()
        times = {
            f"{place} {process.name()}": sum(process.cpu_times()[:2])
            for place, process in enumerate(self._server.processes())
        }
        own = sum(psutil.Process().cpu_times()[:2])
        busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        others = busy - own - sum(times.values())
        return {**times, "load generator": own, "others": others}

    def taken(self) -> Json:
        """Seconds since then. `others` includes what the hypervisor took."""
        seconds = time.perf_counter() - self._start
        used = {name: value - self._before.get(name, 0.0) for name, value in self._now().items()}
        return {
            "processor_s": {name: round(value, 2) for name, value in used.items() if value > 0.02},
            "others_share": max(used["others"], 0.0) / (seconds * (os.cpu_count() or 1)),
        }


async def _ask(port: int, line: str) -> Json:
    """One line to an offline engine, one line back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(line.encode() + b"\n")
    answer = await reader.readline()
    writer.close()
    if not answer:
        raise RuntimeError(f"the offline engine ended while it ran {line!r}")
    result: Json = json.loads(answer)
    return result


def one_run(server: Server, words: Words, workload: str, seed: str) -> Json:
    """One workload on one server that runs."""
    usage = Usage(server)
    if server.is_offline:
        result = run(_ask(server.port, f"{workload} {seed}"))
    else:
        transport = HttpTransport(server.url, SERVED_NAME)
        result = asdict(run(measure(transport, words, workload, seed)))
    return {"result": result, **usage.taken()}


def warm(server: Server, words: Words) -> None:
    """Have a server compute everything once."""
    if server.is_offline:
        run(_ask(server.port, "warm-up 0"))
    else:
        run(warm_up(HttpTransport(server.url, SERVED_NAME), words))


def start_missing(options: argparse.Namespace, running: list[Server]) -> Iterator[Server]:
    """Start the engines that do not run yet; each is yielded at once, then warmed up and paused."""
    setup = Setup(
        models=options.models.resolve(),
        model=options.model,
        threads=options.threads,
        llama_server=options.llama_server,
        vllm_python=options.vllm_python,
        openvino_python=options.openvino_python,
        llama_slots=options.llama_slots,
        arguments=dict(text.split("=", 1) for text in options.arguments),
    )
    words = Words(setup.directory)
    known = {(server.engine, server.model, server.threads) for server in running}
    for engine in options.engines:
        if (engine, setup.model, setup.threads) in known:
            continue
        began = time.perf_counter()
        try:
            server = start(engine, setup, options.logs)
        except RuntimeError as error:
            print(f"not measured: {error}", file=sys.stderr)
            continue
        yield server
        ready = time.perf_counter() - began
        warm(server, words)
        server.pause()
        print(f"{engine} {server.version}: ready after {ready:.1f} s", flush=True)


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """The server runs inside of this, and not before or after."""
    server.resume()
    try:
        yield
    finally:
        server.pause()


def read_records(path: Path) -> list[Json]:
    """What the file holds."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key(record: Json) -> tuple[Any, ...]:
    """What makes a run the same as another."""
    names = ("engine", "model", "threads", "workload", "repetition")
    return tuple(record[name] for name in names)


def in_turns(options: argparse.Namespace, servers: list[Server]) -> Iterator[tuple[Any, ...]]:
    """All runs in their order; who begins changes with each."""
    turn = 0
    for repetition in range(options.repetitions):
        for workload in options.workloads:
            for place in range(len(servers)):
                yield repetition, workload, servers[(place + turn) % len(servers)]
            turn += 1


def measure_all(options: argparse.Namespace, servers: list[Server]) -> bool:
    """Run what is missing until the time is over; whether all is done."""
    deadline = time.monotonic() + options.stop_after
    records = read_records(options.append)
    machine, words = Machine(options.threads), Words(options.models / options.model)
    for repetition, workload, server in in_turns(options, servers):
        record: Json = {
            "engine": server.engine,
            "model": server.model,
            "threads": server.threads,
            "workload": workload,
            "repetition": repetition,
        }
        earlier = [other for other in records if key(other) == key(record)]
        if any(not is_disturbed(other) for other in earlier):
            continue
        if time.monotonic() > deadline:
            return False
        record |= {"time": time.strftime("%F %T"), "machine": machine.probe()}
        with awake(server):
            seed = f"{options.append.name} {repetition} {len(earlier)}"  # never one used before
            record |= one_run(server, words, workload, seed)
        record |= {"version": server.version, "command": server.command}
        with options.append.open("a") as sink:
            sink.write(json.dumps(record) + "\n")
        result = record["result"]
        print(
            f"{workload} {repetition} {server.engine}: {result['output_tokens_per_s']:.1f} out, "
            f"{result['input_tokens_per_s']:.0f} in tok/s, first {result['first_token_p50_ms']:.0f}"
            f" ms, gaps {result['inter_token_p50_ms']:.1f} / {result['inter_token_p99_ms']:.1f} ms,"
            f" {result['seconds']:.1f} s, {record['machine']}, {record['processor_s']},"
            f" others {record['others_share']:.0%}",
            flush=True,
        )
    return True


def run_benchmark(options: argparse.Namespace) -> int:
    """The command `run`."""
    kept = read_state(options.state)
    started: list[Server] = []
    try:
        for server in start_missing(options, kept):
            started.append(server)
        wanted = [
            server
            for engine in options.engines
            for server in [*kept, *started]
            if (server.engine, server.model, server.threads)
            == (engine, options.model, options.threads)
        ]
        is_done = measure_all(options, wanted)
    finally:
        for server in started:
            server.stop()
    print("nothing is left" if is_done else "more is left: run this again")
    return 0 if is_done else 3


def start_engines(options: argparse.Namespace) -> int:
    """The command `start`."""
    servers = read_state(options.state)
    for server in start_missing(options, list(servers)):
        servers.append(server)
        write_state(options.state, servers)
    return 0


def stop_engines(options: argparse.Namespace) -> int:
    """The command `stop`."""
    for server in read_state(options.state):
        server.stop()
    options.state.unlink(missing_ok=True)
    return 0


def report(options: argparse.Namespace) -> int:
    """The command `report`."""
    records = read_records(options.append)
    print_report(records)
    if options.plot is not None:
        from cpu_plots import draw  # matplotlib is wanted here alone

        draw(records, options.plot)
    return 0


def names(known: tuple[str, ...]) -> Any:
    """A reader of lists of known names."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return given

    return read


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = {
        "start": start_engines,
        "run": run_benchmark,
        "stop": stop_engines,
        "report": report,
    }
    parser.add_argument("command", choices=commands)
    parser.add_argument("--engines", type=names(ENGINES), default=["ours"])
    parser.add_argument("--workloads", type=names(tuple(WORKLOADS)), default=list(WORKLOADS)[:5])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--model", default="smollm2-135m", help="name within --models")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--openvino-python", type=Path)
    parser.add_argument("--llama-slots", type=int, default=16, help="64 for the C workloads")
    parser.add_argument(
        "--arguments", action="append", default=[], metavar="ENGINE=WORDS", help="more for one"
    )
    parser.add_argument("--state", type=Path, help="file of servers that stay")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/cpu_serving_logs"))
    parser.add_argument("--append", type=Path, default=Path("cpu_serving.jsonl"))
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.run_command = commands[options.command]
    return options


if __name__ == "__main__":
    chosen = arguments()
    # A time limit's signal ends this as an exception does: servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(chosen.run_command(chosen))
