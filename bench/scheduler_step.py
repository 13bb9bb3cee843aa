"""What does the scheduler cost per step?

Times `plan`, `commit` and `take_events` of `trunkline._core` with a runner that answers at once, in
a steady state: requests of 256 prompt and 128 output tokens, pages of 16 tokens, text decoded, one
delta per token, every finished request replaced by a new one. Prints a table and writes JSON.

    python bench/scheduler_step.py [--steps 400] [--json out.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from trunkline._core import Core
from trunkline.engine.core_config import CoreConfig
from trunkline.engine.messages import SamplingParams, Submit
from trunkline.plan import Plan, encode_result

T = TypeVar("T")

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 128
PAGE_SIZE = 16
VOCAB_SIZE = 49_152
SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One load."""

    name: str
    running: int
    waiting: int
    policy: str
    overlap_depth: int = 0
    shared_prefix: int = 0  # leading prompt tokens that groups of requests share
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per step: medians of processor time, and of the wall clock on this machine."""

    plan: float
    commit: float
    events: float
    total: float
    total_p99: float
    wall: float
    wall_p99: float
    rows: float


CASES = (
    Case("256 running", 256, 0, "fcfs"),
    Case("256 running, overlap 1", 256, 0, "fcfs", overlap_depth=1),
    Case("256 running, 4,096 waiting, lpm", 256, 4096, "lpm", shared_prefix=128, groups=64),
    Case("4,096 running", 4096, 0, "fcfs"),
    Case("4,096 running, 4,096 waiting, lpm", 4096, 4096, "lpm", shared_prefix=128, groups=64),
)


def tokenizer_json() -> str:
    """A byte-level tokenizer whose tokens are short words."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    vocab = {}
    for token in range(VOCAB_SIZE):
        word, rest = "Ġ" if token % 3 else "", token
        while rest:
            word += letters[rest % 26]
            rest //= 26
        vocab[f"{word}{token % 10}"] = token
    return json.dumps(
        {
            "added_tokens": [],
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        }
    )


class Span(NamedTuple):
    """Seconds that a call took."""

    cpu: float
    wall: float


def timed(call: Callable[[], T]) -> tuple[T, Span]:
    """Call it, and measure this thread's processor time and the wall clock."""
    cpu, wall = time.thread_time(), time.perf_counter()
    value = call()
    return value, Span(time.thread_time() - cpu, time.perf_counter() - wall)


class Load:
    """A core kept at a constant number of running and waiting requests."""

    def __init__(self, case: Case, tokenizer: str) -> None:
        self.case = case
        self.random = np.random.default_rng(SEED)
        pages = (PROMPT_TOKENS + OUTPUT_TOKENS) // PAGE_SIZE + 1
        config = CoreConfig(
            page_size=PAGE_SIZE,
            num_pages=1 + (case.running + 64) * pages,
            max_running_requests=case.running,
            max_batch_tokens=4 * case.running + 8 * PROMPT_TOKENS,
            max_context_len=4096,
            vocab_size=VOCAB_SIZE,
            policy=case.policy,
            overlap_depth=case.overlap_depth,
            arena_bytes=16 << 20,
            tokenizer_json=tokenizer,
        )
        self.core = Core(config.to_json())
        # One arena per step in flight, and one to plan into.
        self.arenas = [
            np.zeros(config.arena_bytes, np.uint8) for _ in range(case.overlap_depth + 1)
        ]
        self.prefixes = [self.tokens(case.shared_prefix) for _ in range(case.groups)]
        self.encoder = msgspec.msgpack.Encoder()
        self.key = 0
        self.in_flight: list[Plan] = []
        self.next_arena = 0
        self.rows = 0

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.random.integers(0, VOCAB_SIZE, count)]

    def submit(self, output_tokens: int) -> None:
        self.key += 1
        prefix = self.prefixes[self.key % self.case.groups]
        prompt = prefix + self.tokens(PROMPT_TOKENS - len(prefix))
        sampling = SamplingParams(max_new_tokens=output_tokens, ignore_eos=True, seed=self.key)
        message = Submit(key=self.key, rid=f"r{self.key}", prompt=prompt, sampling=sampling)
        self.core.submit(0, self.encoder.encode(message), time.time())

    def refill(self) -> None:
        """Submit as many requests as have ended."""
        missing = self.case.running + self.case.waiting - int(self.core.stats()["num_requests"])
        for _ in range(missing):
            self.submit(OUTPUT_TOKENS)

    def step(self) -> list[Span]:
        """One plan, execution and commit: what plan, commit and events took; [] while filling."""
        now = time.time()
        arena = self.arenas[self.next_arena]
        step, planned = timed(lambda: self.core.plan(now, arena.data))
        if step is not None:
            self.in_flight.append(Plan(arena))
            self.next_arena = (self.next_arena + 1) % len(self.arenas)
            if len(self.in_flight) <= self.case.overlap_depth:
                return []
        plan = self.in_flight.pop(0)
        samples = plan.sample_slot.size
        tokens = self.random.integers(0, VOCAB_SIZE, samples, dtype=np.int32)
        counts = np.ones(samples, dtype=np.int32)
        result = encode_result(plan.step, {"sample_counts": counts, "token_ids": tokens})
        self.rows = int(plan.row_slot.size)
        _, committed = timed(lambda: self.core.commit(now, result.data))
        _, taken = timed(self.core.take_events)
        return [planned, committed, taken]

    def measure(self, steps: int) -> Timing:
        # Requests that end one after another, as they do after hours of work.
        for _ in range(self.case.running):
            self.submit(int(self.random.integers(2, OUTPUT_TOKENS)))
        for _ in range(self.case.waiting):
            self.submit(OUTPUT_TOKENS)
        warm_up = OUTPUT_TOKENS + 2 * self.case.running * PROMPT_TOKENS // (8 * PROMPT_TOKENS)
        spans = []
        rows = []
        gc.disable()
        for step in range(warm_up + steps):
            timing = self.step()
            if step >= warm_up and timing:
                spans.append(timing)
                rows.append(self.rows)
            self.refill()
        gc.enable()
        self.core.check_integrity()
        cpu, wall = np.moveaxis(np.array(spans) * 1e6, 2, 0)
        return Timing(
            plan=float(np.median(cpu[:, 0])),
            commit=float(np.median(cpu[:, 1])),
            events=float(np.median(cpu[:, 2])),
            total=float(np.median(cpu.sum(axis=1))),
            total_p99=float(np.quantile(cpu.sum(axis=1), 0.99)),
            wall=float(np.median(wall.sum(axis=1))),
            wall_p99=float(np.quantile(wall.sum(axis=1), 0.99)),
            rows=float(np.mean(rows)),
        )


def machine() -> str:
    """Name of the processor, and how busy it is."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor()
    return f"{os.cpu_count()} x {name}, load average {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps measured per case")
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()
    print(machine())
    print(f"{PROMPT_TOKENS} in / {OUTPUT_TOKENS} out, page {PAGE_SIZE}; microseconds per step")
    columns = ("rows", "plan", "commit", "events", "total", "p99", "wall", "wall p99")
    print(f"{'case':34}" + "".join(f"{column:>10}" for column in columns))
    tokenizer = tokenizer_json()
    results = []
    for case in CASES:
        timing = Load(case, tokenizer).measure(arguments.steps)
        results.append({"case": asdict(case), "timing": asdict(timing)})
        cpu = (timing.plan, timing.commit, timing.events, timing.total, timing.total_p99)
        figures = (*cpu, timing.wall, timing.wall_p99)
        print(f"{case.name:34}{timing.rows:10.0f}" + "".join(f"{value:10.1f}" for value in figures))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
