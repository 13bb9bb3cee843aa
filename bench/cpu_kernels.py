"""How close the CPU kernels come to the hardware: linears, attention, whole steps.

Every figure stands beside the rate at which the same memory is merely read, measured in the same
run, since a shared machine's memory speed drifts.

    python bench/cpu_kernels.py [--threads 2] [--isa avx512_bf16] [--json cpu_kernels.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trunkline._core import Core
from trunkline.engine.checkpoint import Checkpoint
from trunkline.engine.config import ModelOptions
from trunkline.engine.core_config import CoreConfig
from trunkline.engine.messages import SamplingParams, Submit
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.runner import Runner, RunnerOptions
from trunkline.engine.weights import open_checkpoint
from trunkline.kernels import BackendOptions
from trunkline.kernels.cpu.backend import ISA_VARIABLE, THREADS_VARIABLE
from trunkline.kernels.cpu.native import CpuAttentionBench, CpuLinearBench
from trunkline.plan import Plan

QWEN_05B = DecoderConfig(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    max_position=32_768,
)
ROWS = (1, 2, 4, 8, 16, 64, 256)
BLOCKS = ("Q8_0", "Q4_0", "Q4_1")  # int8 is computed as Q8_0 is
MAX_CONTEXT = 2048


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    threads: int | None
    isa: str | None
    quick: bool
    quantization: str


def median(run: Callable[[], float], count: int) -> float:
    """Median of `count` measurements after one that warms up."""
    run()
    return statistics.median(run() for _ in range(count))


def shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """All linears of one token, in their order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.num_heads * config.head_dim
    layer = [
        (width + 2 * config.num_kv_heads * config.head_dim, hidden),
        (hidden, width),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return [*layer * config.num_layers, (config.vocab_size, hidden)]


def linears(
    name: str, config: DecoderConfig, settings: Settings, blocks: str | None = None
) -> list[dict[str, Any]]:
    """All linears of a model at several numbers of rows: bfloat16, or blocks of a GGUF type."""
    bench = CpuLinearBench("bfloat16", shapes(config), settings.isa, settings.threads, blocks)
    records = []
    products = sum(outputs * inputs for outputs, inputs in shapes(config))
    for rows in ROWS:
        count = 3 if rows > 16 or settings.quick else 11
        seconds = median(lambda rows=rows: bench.linears(rows), count)
        read = median(bench.streaming_read, 5)
        records.append(
            {
                "model": name,
                "weights": blocks or "bfloat16",
                "rows": rows,
                "ms": seconds * 1e3,
                "gb_per_s": bench.num_bytes / seconds / 1e9,
                "gop_per_s": 2 * products * rows / seconds / 1e9,
                "read_gb_per_s": bench.num_bytes / read / 1e9,
                "share_of_read": read / seconds,
            }
        )
        print_record(records[-1])
    return records


# Scheduled and computed tokens of each row, and how many leading tokens all share.
ATTENTION: dict[str, tuple[list[tuple[int, int]], int]] = {
    "1 decodes at 1,500": ([(1, 1500)], 0),
    "16 decode at 320": ([(1, 320)] * 16, 0),
    "16 decode at 1,500": ([(1, 1500)] * 16, 0),
    "16 decode at 1,100, 1,024 shared": ([(1, 1100)] * 16, 1024),
    "4 chunks of 64 on 1,024 shared": ([(64, 1024)] * 4, 1024),
    "chunk of 256 on 0": ([(256, 0)], 0),
    "chunk of 512 on 988": ([(512, 988)], 0),
}


def attention(config: DecoderConfig, settings: Settings) -> list[dict[str, Any]]:
    """Attention alone; the bytes are those of distinct keys and values, read once."""
    shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    bench = CpuAttentionBench("bfloat16", shape, 32_000, settings.isa, settings.threads)
    token_bytes = config.num_layers * config.num_kv_heads * config.head_dim * 4
    pair_operations = config.num_layers * config.num_heads * config.head_dim * 4
    records = []
    for name, (rows, shared) in ATTENTION.items():
        seconds = median(lambda rows=rows, shared=shared: bench.attend(rows, shared), 11)
        tokens = sum(query + computed - shared for query, computed in rows) + shared
        pairs = sum(query * computed + query * (query + 1) / 2 for query, computed in rows)
        records.append(
            {
                "attention": name,
                "ms": seconds * 1e3,
                "gb_per_s": token_bytes * tokens / seconds / 1e9,
                "gflop_per_s": pair_operations * pairs / seconds / 1e9,
            }
        )
        print_record(records[-1])
    return records


class Session:
    """Scheduler and runner of the default model, stepped by hand."""

    def __init__(self, checkpoint: Checkpoint, batch: int, quantization: str) -> None:
        pages = batch * (MAX_CONTEXT // 16) + 64
        self.runner = Runner(
            checkpoint,
            RunnerOptions(
                num_pages=pages,
                max_running_requests=batch,
                max_context_len=MAX_CONTEXT,
                backend="cpu",
                computation=BackendOptions(quantization=quantization),
                progress=False,
            ),
        )
        self._batch = batch
        self._core = Core(
            CoreConfig(
                num_pages=pages,
                max_running_requests=batch,
                max_batch_tokens=2048,
                max_context_len=MAX_CONTEXT,
                vocab_size=checkpoint.config.vocab_size,
                prefix_cache=False,
            ).to_json()
        )
        self._arena = np.zeros(4 << 20, np.uint8)

    def run(self, prompt_len: int, outputs: int, temperature: float) -> dict[str, float]:
        """Generate; medians over the steps that decode the whole batch."""
        generator = np.random.default_rng(1)
        for key in range(self._batch):
            sampling = SamplingParams(
                temperature=temperature,
                max_new_tokens=outputs,
                ignore_eos=True,
                seed=key,
                top_p=0.95,
            )
            prompt = generator.integers(0, 49_000, prompt_len).tolist()
            submit = Submit(key=key, rid=str(key), prompt=prompt, sampling=sampling)
            self._core.submit(0, msgspec.msgpack.encode(submit), time.time())
        prefill, decode, sample, whole = 0.0, [], [], []
        while self._core.has_work():
            start = time.perf_counter()
            if self._core.plan(time.time(), self._arena) is None:
                break
            plan = Plan(self._arena)
            planned = time.perf_counter()
            self.runner.forward(plan)
            computed = time.perf_counter()
            block = self.runner.sample(plan).wait()
            sampled = time.perf_counter()
            self._core.commit(time.time(), block)
            self._core.take_events()
            end = time.perf_counter()
            if plan.token_ids.size == self._batch == plan.sample_slot.size:
                decode.append(computed - planned)
                sample.append(sampled - computed)
                whole.append(end - start)
            else:
                prefill += sampled - planned
        step = statistics.median(whole)
        return {
            "prefill_tokens_per_s": self._batch * prompt_len / prefill,
            "forward_ms": statistics.median(decode) * 1e3,
            "sample_ms": statistics.median(sample) * 1e3,
            "overhead_ms": (step - statistics.median(decode) - statistics.median(sample)) * 1e3,
            "decode_tokens_per_s": self._batch / step,
        }


def whole_steps(checkpoint: Checkpoint, settings: Settings) -> list[dict[str, Any]]:
    """Decoding and prompts of the default model, scheduler included."""
    bench = CpuLinearBench("bfloat16", shapes(checkpoint.config), settings.isa, settings.threads)
    records = []
    cases = [(1, 64, 0.0), (1, 1500, 0.0), (4, 256, 0.0), (16, 256, 0.0), (16, 256, 0.8)]
    for batch, prompt_len, temperature in cases:
        outputs = 24 if settings.quick else 96
        session = Session(checkpoint, batch, settings.quantization)
        read = median(bench.streaming_read, 5)
        result = session.run(prompt_len, outputs, temperature)
        again = median(bench.streaming_read, 5)
        records.append(
            {
                "batch": batch,
                "prompt": prompt_len,
                "temperature": temperature,
                **result,
                "read_gb_per_s": bench.num_bytes * 2 / (read + again) / 1e9,
            }
        )
        print_record(records[-1])
    return records


def print_record(record: dict[str, Any]) -> None:
    """One line."""
    fields = [
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.items()
    ]
    print("  ".join(fields), flush=True)


def main() -> None:
    """Measure everything, print it, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", choices=("linears", "attention", "steps"))
    parser.add_argument("--quantization", default="none", help="of whole steps: none, int8 or gguf")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = Settings(arguments.threads, arguments.isa, arguments.quick, arguments.quantization)
    for variable, value in ((ISA_VARIABLE, settings.isa), (THREADS_VARIABLE, settings.threads)):
        if value is not None:
            os.environ[variable] = str(value)
    checkpoint = open_checkpoint(ModelOptions())
    records: dict[str, Any] = {"command": sys.argv, "load_average": os.getloadavg()}
    print("load average", os.getloadavg())
    if arguments.only in (None, "linears"):
        records["linears"] = linears("smollm2-135m", checkpoint.config, settings)
        records["linears"] += linears("qwen2.5-0.5b", QWEN_05B, settings)
        for blocks in BLOCKS:
            records["linears"] += linears("smollm2-135m", checkpoint.config, settings, blocks)
    if arguments.only in (None, "attention"):
        records["attention"] = attention(checkpoint.config, settings)
    if arguments.only in (None, "steps"):
        records["steps"] = whole_steps(checkpoint, settings)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
