"""How fast does a server answer? Four workloads over streaming `/v1/completions`.

Works against any server that speaks the OpenAI API and takes prompts as lists of token ids. Prompts
are random ids from a range that every vocabulary has; each repetition has a seed of its own, so
that none hits the cache of another. One connection per request; times are taken at each event.

    engine-serve --port 30000 &
    python bench/serving.py --url http://127.0.0.1:30000 [--workloads W1 W2] [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

FIRST_ID, LAST_ID = 1000, 30_000
SHARED_TOKENS = 1024


@dataclass(slots=True)
class Request:
    """What one request took. Times in seconds since the workload's start."""

    prompt_tokens: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a workload."""

    workload: str
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float


class Load:
    """Sends requests to one server and notes when their tokens arrive."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        """Make a load; `seed` decides all prompts."""
        self._url = f"{url}/v1/completions"
        self._model = model
        self._random = random.Random(seed)
        self._start = time.perf_counter()
        self.requests: list[Request] = []

    def prompt(self, tokens: int) -> list[int]:
        """Random ids."""
        return [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def now(self) -> float:
        """Seconds since the load was made."""
        return time.perf_counter() - self._start

    async def send(self, prompt: list[int], output_tokens: int) -> None:
        """One streamed request; returns when its stream has ended."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Certificates are of no use here, and to load them takes longer than a short prompt.
        async with httpx.AsyncClient(timeout=600, verify=False) as client:
            request = Request(len(prompt), self.now())
            self.requests.append(request)
            async with client.stream("POST", self._url, json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    self._note(request, line)

    def _note(self, request: Request, line: str) -> None:
        if not line.startswith("data: {"):
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        if chunk.get("usage"):
            request.output_tokens = chunk["usage"]["completion_tokens"]
        elif any(choice.get("text") for choice in chunk["choices"]):
            request.arrivals.append(self.now())

    async def workers(self, number: int, jobs: list[Callable[[], Awaitable[None]]]) -> None:
        """Run the jobs, `number` at a time."""
        left = iter(jobs)

        async def worker() -> None:
            for job in left:
                await job()

        await asyncio.gather(*(worker() for _ in range(number)))

    def result(self, workload: str) -> Result:
        """Sum up."""
        elapsed = max(request.arrivals[-1] for request in self.requests)
        first = [1e3 * (request.arrivals[0] - request.sent) for request in self.requests]
        gaps = [
            1e3 * (after - before)
            for request in self.requests
            for before, after in zip(request.arrivals, request.arrivals[1:], strict=False)
        ]
        return Result(
            workload=workload,
            requests_per_s=len(self.requests) / elapsed,
            input_tokens_per_s=sum(request.prompt_tokens for request in self.requests) / elapsed,
            output_tokens_per_s=sum(request.output_tokens for request in self.requests) / elapsed,
            first_token_p50_ms=statistics.median(first),
            first_token_p99_ms=percentile(first, 0.99),
            inter_token_p50_ms=statistics.median(gaps),
            inter_token_p99_ms=percentile(gaps, 0.99),
        )


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of all lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def independent(load: Load, number: int, prompt: int, output: int, at_once: int) -> None:
    """Requests that share nothing."""
    prompts = [load.prompt(prompt) for _ in range(number)]
    await load.workers(at_once, [lambda ids=ids: load.send(ids, output) for ids in prompts])


async def shared_prefix(load: Load) -> None:
    """64 requests that share 1,024 leading tokens."""
    prefix = load.prompt(SHARED_TOKENS)
    prompts = [prefix + load.prompt(64) for _ in range(64)]
    await load.workers(16, [lambda ids=ids: load.send(ids, 32) for ids in prompts])


WORKLOADS: dict[str, Callable[[Load], Awaitable[None]]] = {
    "W1": lambda load: independent(load, 8, 64, 128, 1),
    "W2": lambda load: independent(load, 64, 256, 128, 16),
    "W3": shared_prefix,
    "W4": lambda load: independent(load, 16, 1500, 4, 4),
}


async def measure(url: str, model: str, name: str, seed: int) -> Result:
    """One run of one workload."""
    load = Load(url, model, seed)
    await WORKLOADS[name](load)
    return load.result(name)


def median_of(results: list[Result]) -> Result:
    """Field by field."""
    rows = [asdict(result) for result in results]
    numbers = {
        key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "workload"
    }
    return Result(workload=results[0].workload, **numbers)


def main() -> None:
    """Run the workloads and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asyncio.run(measure(options.url, options.model, "W1", seed=0))
    medians = []
    print(f"{platform.processor() or platform.machine()}, {options.runs} runs, medians")
    print("| workload | req/s | in tok/s | out tok/s | TTFT p50 ms | p99 | ITL p50 ms | p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.workloads:
        runs = [
            asyncio.run(measure(options.url, options.model, name, seed=100 * run + 1))
            for run in range(options.runs)
        ]
        medians.append(median_of(runs))
        numbers = [value for value in asdict(medians[-1]).values() if isinstance(value, float)]
        cells = " | ".join(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in numbers)
        print(f"| {name} | {cells} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in medians], indent=1))


if __name__ == "__main__":
    main()
