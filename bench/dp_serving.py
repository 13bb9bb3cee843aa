"""What is cache-aware choice worth with two engines on one machine?

Groups of requests share a prefix. The same requests, in the same order, go to a single engine, and
to two engines that share its memory and cores, chosen by cached prefixes and in turn. The KV pool
of one of the two holds half of the prefixes and some more, so who scatters them loses them. A fixed
number of clients each send the next request when their last one has ended.

    python bench/dp_serving.py [--repeats 3] [--model-path M] [--json out.json]

Starts its servers itself, one at a time; medians over the repetitions, which differ in their seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

FIRST_ID, LAST_ID = 1000, 30_000
SETUPS = {
    "single": ["--dp-size", "1"],
    "cache_aware": ["--dp-size", "2", "--load-balance-method", "cache_aware"],
    "round_robin": ["--dp-size", "2", "--load-balance-method", "round_robin"],
}


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the workload."""

    setup: str
    hit_rate: float
    first_token_mean_ms: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    requests_per_s: float
    requests_per_rank: dict[str, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got."""

    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    rank: int | None


def workload(options: argparse.Namespace, seed: int) -> list[list[int]]:
    """The prompts, in the order in which they are sent."""
    numbers = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [numbers.randrange(FIRST_ID, LAST_ID) for _ in range(count)]

    prefixes = [ids(options.prefix_tokens) for _ in range(options.groups)]
    order = [group for group in range(options.groups) for _ in range(options.requests_per_group)]
    numbers.shuffle(order)
    return [prefixes[group] + ids(options.question_tokens) for group in order]


async def send(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> Answer:
    """One streamed request, until its end."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    started_at = time.perf_counter()
    first_token_s, last = 0.0, ""
    async with client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_token_s = first_token_s or time.perf_counter() - started_at
                last = line
    meta = json.loads(last[6:])["meta_info"]
    assert meta["completion_tokens"] == tokens, "the stream was cut short"
    return Answer(first_token_s, meta["prompt_tokens"], meta["cached_tokens"], meta["dp_rank"])


async def run(url: str, prompts: list[list[int]], options: argparse.Namespace) -> list[Answer]:
    """Send everything, `--clients` at a time."""
    left = iter(prompts)
    answers: list[Answer] = []

    async def work(client: httpx.AsyncClient) -> None:
        for prompt in left:
            answers.append(await send(client, prompt, options.output_tokens))

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(work(client) for _ in range(options.clients)))
    return answers


@contextmanager
def server(setup: str, options: argparse.Namespace) -> Iterator[str]:
    """A server that is ready, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One prefix more than half of them, and what its running requests need.
    rows = options.prefix_tokens + options.question_tokens + options.output_tokens
    pool = options.prefix_tokens * (options.groups // 2 + 1) + options.clients * rows
    per_engine = 2 * pool if setup == "single" else pool
    command = [
        *(sys.executable, "-m", "trunkline", "--port", str(port), "--log-level", "warning"),
        *("--max-total-tokens", str(per_engine // 16 * 16), *SETUPS[setup]),
        *(["--model-path", options.model_path] if options.model_path else []),
    ]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def measure(setup: str, seed: int, options: argparse.Namespace) -> Result:
    """One run with a server of its own."""
    prompts = workload(options, seed)
    with server(setup, options) as url:
        started_at = time.perf_counter()
        answers = asyncio.run(run(url, prompts, options))
        elapsed = time.perf_counter() - started_at
    firsts = sorted(1000 * answer.first_token_s for answer in answers)
    ranks = [str(answer.rank or 0) for answer in answers]
    return Result(
        setup=setup,
        hit_rate=sum(one.cached_tokens for one in answers)
        / sum(one.prompt_tokens for one in answers),
        first_token_mean_ms=statistics.fmean(firsts),
        first_token_p50_ms=firsts[len(firsts) // 2],
        first_token_p99_ms=firsts[int(0.99 * (len(firsts) - 1))],
        requests_per_s=len(answers) / elapsed,
        requests_per_rank={rank: ranks.count(rank) for rank in sorted(set(ranks))},
    )


def report(results: list[Result], options: argparse.Namespace) -> None:
    """The medians, and what they say."""
    fields = ("hit_rate", "first_token_mean_ms", "first_token_p99_ms", "requests_per_s")
    medians = {
        setup: {
            field: statistics.median(getattr(one, field) for one in results if one.setup == setup)
            for field in fields
        }
        for setup in SETUPS
    }
    print(f"\nload average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {platform.machine()}")
    print(f"{'':14}{'hit rate':>9}{'TTFT mean ms':>14}{'TTFT p99 ms':>13}{'requests/s':>12}")
    for setup, row in medians.items():
        cells = [row[field] for field in fields]
        print(f"{setup:14}{cells[0]:9.3f}{cells[1]:14.0f}{cells[2]:13.0f}{cells[3]:12.2f}")
    aware, turn = medians["cache_aware"], medians["round_robin"]
    points = 100 * (medians["single"]["hit_rate"] - aware["hit_rate"])
    ratio = aware["first_token_mean_ms"] / turn["first_token_mean_ms"]
    print(f"cache_aware: hit rate {points:.1f} points below the single engine's, mean TTFT")
    print(f"{ratio:.2f} of round robin's")
    if options.json:
        runs = [asdict(result) for result in results]
        document = {"options": vars(options), "runs": runs, "medians": medians}
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")


def main() -> None:
    """Run every setup `--repeats` times, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-path", help="default: the embedded model")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--requests-per-group", type=int, default=16)
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--question-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    for seed in range(options.repeats):
        for setup in SETUPS:
            results.append(measure(setup, seed, options))
            print(json.dumps(asdict(results[-1])), flush=True)
    report(results, options)


if __name__ == "__main__":
    main()
