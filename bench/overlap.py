"""Does it pay to plan a step while another is computed, and what does the loop's Python cost?

`loop`: a device that answers at once; what a step of the loop costs besides `Core` and device, with
64 requests that decode, text and streaming included. `model`: tokens per second of the default
model with its runner in a thread (overlap depth 1), against the same runner called directly.

    python bench/overlap.py loop [--steps 2000] [--rows 64]
    python bench/overlap.py model [--batch 1 8 32] [--tokens 96] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trunkline._core import Core
from trunkline.engine import launch, messages
from trunkline.engine.channel import Message
from trunkline.engine.checkpoint import Checkpoint
from trunkline.engine.core_config import CoreConfig
from trunkline.engine.launch import LaunchedEngine
from trunkline.engine.local import EngineHost
from trunkline.engine.loop import EngineLoop, LoopOptions
from trunkline.engine.messages import SamplingParams, Submit
from trunkline.engine.native_request import RequestContext, parse_generate
from trunkline.engine.stream import Request
from trunkline.engine.validation import Limits
from trunkline.engine.weights import open_checkpoint
from trunkline.kernels import Finished
from trunkline.plan import Plan, encode_result

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engine.overlap.runner_thread import RunnerThread

VOCAB_SIZE = 49_152
PROMPT_TOKENS = 64


class InstantRunner:
    """Draws the ids that it is told to."""

    def __init__(self, ids: np.ndarray) -> None:
        self._ids = ids
        self.seconds = 0.0

    def forward(self, plan: Plan) -> None:
        pass

    def awaits_earlier(self, plan: Plan) -> bool:
        return False

    def sample(self, plan: Plan) -> Finished:
        started_at = time.perf_counter()
        samples = plan.sample_slot.size
        sections = {
            "sample_counts": np.ones(samples, np.int32),
            "token_ids": self._ids[:samples],
        }
        result = Finished(encode_result(plan.step, sections))
        self.seconds += time.perf_counter() - started_at
        return result


class TimedCore:
    """A core whose calls are timed."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.seconds = {"plan": 0.0, "commit": 0.0, "take_events": 0.0}

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._core, name)
        if name not in self.seconds:
            return call

        def timed(*arguments: Any) -> Any:
            started_at = time.perf_counter()
            value = call(*arguments)
            self.seconds[name] += time.perf_counter() - started_at
            return value

        return timed


class FullPort:
    """Submits requests at once, and stops the loop after so many turns."""

    def __init__(self, requests: list[Message], turns: int) -> None:
        self._requests = requests
        self._turns = turns
        self.stop: Callable[[], None] = lambda: None
        self.sent = 0

    def receive(self, timeout_s: float) -> list[Message]:
        self._turns -= 1
        if self._turns == 0:
            self.stop()
        taken, self._requests = self._requests, []
        return taken

    def send(self, client: int, blob: bytes) -> bool:
        self.sent += len(blob)
        return True

    def wake(self) -> None:
        pass


def request(key: int, tokens: int) -> Message:
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=key)
    prompt = [(key * 31 + index) % VOCAB_SIZE for index in range(PROMPT_TOKENS)]
    submit = Submit(key=key, rid=f"r{key}", prompt=prompt, sampling=sampling)
    return Message(0, messages.SUBMIT, msgspec.msgpack.encode(submit))


def loop_cost(depth: int, rows: int, steps: int) -> dict[str, float]:
    """Microseconds per step of the loop, and of what it calls."""
    config = CoreConfig(
        num_pages=1 + rows * (PROMPT_TOKENS + steps) // 16 + 2 * rows,
        max_running_requests=rows,
        max_batch_tokens=rows * PROMPT_TOKENS * 2,
        max_context_len=PROMPT_TOKENS + steps + 2,
        vocab_size=VOCAB_SIZE,
        overlap_depth=depth,
    )
    core = TimedCore(Core(config.to_json()))
    port = FullPort([request(key, steps) for key in range(rows)], steps)
    runner = InstantRunner(np.arange(rows, dtype=np.int32) * 7)
    options = LoopOptions(
        arena_bytes=config.arena_bytes,
        overlap_depth=depth,
        log_interval_steps=40,
        max_total_tokens=config.num_pages * config.page_size,
        beat=lambda: None,
    )
    loop = EngineLoop(core, runner, port, options)
    port.stop = loop.stop
    started_at = time.perf_counter()
    loop.run()
    total = time.perf_counter() - started_at
    spans = {**core.seconds, "runner": runner.seconds}
    spans["loop"] = total - sum(spans.values())
    return {name: 1e6 * seconds / steps for name, seconds in {**spans, "total": total}.items()}


def overlapped(engine: LaunchedEngine) -> LaunchedEngine:
    """The same engine with its runner in a thread."""
    config = replace(engine.core_config, overlap_depth=RunnerThread.overlap_depth)
    core = Core(config.to_json())
    return replace(engine, core_config=config, core=core, runner=RunnerThread(engine.runner))  # type: ignore[arg-type]


class Bodies:
    """Makes requests of a model."""

    def __init__(self, checkpoint: Checkpoint, tokens: int) -> None:
        self.tokens = tokens
        self._context = RequestContext(
            tokenizer=checkpoint.tokenizer,
            limits=Limits(vocab_size=VOCAB_SIZE, context_length=2048),
            defaults={},
        )

    def request(self, key: int) -> Request:
        sampling = {"max_new_tokens": self.tokens, "ignore_eos": True, "temperature": 0.7}
        prompt = [(key * 31 + index) % 40_000 for index in range(PROMPT_TOKENS)]
        body = {"input_ids": prompt, "sampling_params": sampling}
        return parse_generate(body, self._context).requests[0]


def throughput(engine: LaunchedEngine, bodies: Bodies, batch: int, rounds: int) -> list[float]:
    """Tokens per second of every round."""
    host = EngineHost(replace(engine, core=Core(engine.core_config.to_json())))

    async def one_round(number: int) -> float:
        client = await host.client()
        requests = [bodies.request(number * batch + index) for index in range(batch)]
        started_at = time.perf_counter()
        streams = [client.submit(request) for request in requests]
        await asyncio.gather(*(stream.finished() for stream in streams))
        return batch * bodies.tokens / (time.perf_counter() - started_at)

    try:
        return [host.run(one_round(number)) for number in range(rounds)]
    finally:
        host.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("loop", "model"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.what == "loop":
        for depth in (0, 1):
            cost = loop_cost(depth, arguments.rows, arguments.steps)
            print(json.dumps({"depth": depth} | {name: round(us, 1) for name, us in cost.items()}))
        return
    config = launch.engine_config({"max_total_tokens": 16_384, "max_prefill_tokens": 1024})
    checkpoint = open_checkpoint(config.model)
    bodies = Bodies(checkpoint, arguments.tokens)
    direct = launch.build(config, checkpoint)
    thread = overlapped(direct)
    for batch in arguments.batch:
        for _ in range(2):
            for name, engine in (("direct", direct), ("thread", thread)):
                rates = throughput(engine, bodies, batch, arguments.rounds)
                median = round(statistics.median(rates), 1)
                print(json.dumps({"batch": batch, "runner": name, "tokens_per_s": median}))


if __name__ == "__main__":
    main()
