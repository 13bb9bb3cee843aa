"""What does structured output cost? Throughput with and without a schema, and stalls of others.

Cost: the same prompts, lengths and number of streams, free and bound by a schema that never ends
before `max_tokens`, in turns. Stalls: the gaps between tokens of free streams at rest and while
grammars that take seconds compile, one after another, each for the first time.

    engine-serve --port 30000 &
    python bench/structured.py --url http://127.0.0.1:30000 [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

FIRST_ID, LAST_ID = 1000, 30_000
PROMPT_TOKENS = 64
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "kind": {"enum": ["person", "company", "robot"]},
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Report:
    """Tokens per second, and gaps between tokens in milliseconds."""

    machine: str
    streams: int
    output_tokens: int
    free_tokens_per_s: float
    bound_tokens_per_s: float
    cost_percent: float
    compile_s: float
    gap_p99_at_rest_ms: float
    gap_p99_compiling_ms: float
    gap_max_at_rest_ms: float
    gap_max_compiling_ms: float


class Server:
    """One server that speaks the completions API."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        """`seed` decides all prompts."""
        self._url = f"{url}/v1/completions"
        self._model = model
        self._random = random.Random(seed)

    async def stream(self, most: int, **fields: Any) -> tuple[list[float], int]:
        """One streamed request: when its tokens came, and how many they were."""
        body = {
            "model": self._model,
            "prompt": [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(PROMPT_TOKENS)],
            "max_tokens": most,
            "temperature": 0.7,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        arrivals, tokens = [], 0
        async with (
            httpx.AsyncClient(timeout=600, verify=False) as client,
            client.stream("POST", self._url, json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if chunk.get("usage"):
                        tokens = chunk["usage"]["completion_tokens"]
                    else:
                        arrivals.append(time.perf_counter())
        return arrivals, tokens

    async def throughput(self, streams: int, most: int, **fields: Any) -> float:
        """Tokens per second of some streams that start together."""
        started_at = time.perf_counter()
        outcomes = await asyncio.gather(*(self.stream(most, **fields) for _ in range(streams)))
        return sum(tokens for _, tokens in outcomes) / (time.perf_counter() - started_at)

    async def gaps(self, streams: int, most: int) -> list[float]:
        """Milliseconds between the tokens of free streams that run together."""
        outcomes = await asyncio.gather(*(self.stream(most) for _ in range(streams)))
        return [
            1e3 * (after - before)
            for arrivals, _ in outcomes
            for before, after in itertools.pairwise(arrivals)
        ]

    async def compile(self, size: int) -> float:
        """Seconds until a grammar that nobody has asked for before yields a token."""
        started_at = time.perf_counter()
        await self.stream(1, ebnf=slow_ebnf(size, self._random.randrange(10**9)))
        return time.perf_counter() - started_at


def slow_ebnf(size: int, unique: int) -> str:
    """A grammar whose masks are work; compiling takes longer the larger `size` is."""
    rules = [f'r{n} ::= [a-z{n % 10}]* "{n}" [^x]* r{n + 1} | [^{n % 10}]+' for n in range(size)]
    return "\n".join(["root ::= r0", *rules, f'r{size} ::= "{unique}"'])


async def compiling(server: Server, size: int, seconds: list[float]) -> None:
    """Have grammars compiled until cancelled."""
    while True:
        seconds.append(await server.compile(size))


async def measure(server: Server, arguments: argparse.Namespace) -> Report:
    """Run everything; the median counts."""
    streams, most = arguments.streams, arguments.output
    bound_by = {"json_schema": SCHEMA}
    await server.throughput(2, 8, **bound_by)  # compiled, and everything warm
    free, bound = [], []
    for _ in range(arguments.repeats):
        free.append(await server.throughput(streams, most))
        bound.append(await server.throughput(streams, most, **bound_by))
    seconds: list[float] = []
    at_rest = await server.gaps(streams // 2, most)
    task = asyncio.create_task(compiling(server, arguments.size, seconds))
    await asyncio.sleep(0.2)
    meanwhile = await server.gaps(streams // 2, most)
    task.cancel()
    free_rate, bound_rate = statistics.median(free), statistics.median(bound)
    return Report(
        machine=f"{platform.machine()} {platform.processor()}",
        streams=streams,
        output_tokens=most,
        free_tokens_per_s=free_rate,
        bound_tokens_per_s=bound_rate,
        cost_percent=100 * (1 - bound_rate / free_rate),
        compile_s=statistics.median(seconds) if seconds else float("nan"),
        gap_p99_at_rest_ms=percentile(at_rest, 0.99),
        gap_p99_compiling_ms=percentile(meanwhile, 0.99),
        gap_max_at_rest_ms=max(at_rest),
        gap_max_compiling_ms=max(meanwhile),
    )


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of all lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output", type=int, default=256, help="tokens per stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", type=int, default=60, help="of the slow grammar")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    server = Server(arguments.url, arguments.model, arguments.seed)
    report = asdict(asyncio.run(measure(server, arguments)))
    for name, value in report.items():
        print(f"{name:24} {value:.1f}" if isinstance(value, float) else f"{name:24} {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
