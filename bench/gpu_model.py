"""A random model through the CUDA backend: its steps against the roofline, and against each other.

For `gpu_check.py`. Plans are written here, so that no scheduler is timed; weights are made on the
device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_timing import Ceilings, Finding, Report

from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.models.decoder import Decoder
from trunkline.engine.operation_program import OperationProgram
from trunkline.kernels import (
    BackendOptions,
    KvSpec,
    ProgramBackend,
    ProgramSizes,
    StepProgram,
    select_backend,
)
from trunkline.plan import (
    PLAN_HEADER_BYTES,
    PLAN_MAGIC,
    PLAN_SECTIONS,
    SECTION_TABLE_WORD,
    VERSION,
    Plan,
    decode_result,
)

PAGE_SIZE = 16
GRAPH_ROWS = 256
SEED = 20
QUEUED_STEPS = 3  # launched at once, to time the device alone; a program takes so many unwaited
BUSY_CYCLES = 200_000_000  # for about 0.1 s, in which they are launched


def _config(**sizes: Any) -> DecoderConfig:
    return DecoderConfig(
        architecture="LlamaForCausalLM", model_type="llama", rms_norm_eps=1e-5, **sizes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model, the batches that it decodes with, and for how many steps.

    `batches` are `(rows, tokens that each has already)`.
    """

    config: DecoderConfig
    batches: tuple[tuple[int, int], ...]
    num_steps: int
    graph_rows: int


LARGE = Trial(
    config=_config(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
    ),
    batches=((1, 4096), (64, 4096), (256, 1024)),
    num_steps=40,
    graph_rows=GRAPH_ROWS,
)
SMALL = Trial(
    config=_config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position=128,
    ),
    batches=((1, 20), (3, 17)),
    num_steps=2,
    graph_rows=4,
)


@dataclass(slots=True)
class Device:
    """A model with random weights and its program."""

    program: StepProgram
    weight_bytes: int


def make_plan(step: int, sections: dict[str, Any]) -> Plan:
    """A plan block of the given sections; the others are empty."""
    header = np.zeros(PLAN_HEADER_BYTES // 8, np.int64)
    header[:4] = (PLAN_MAGIC, VERSION, step, 0)
    parts = [header.view(np.uint8)]
    offset = PLAN_HEADER_BYTES
    for index, (name, dtype, _) in enumerate(PLAN_SECTIONS):
        array = np.asarray(sections.get(name, []), dtype=dtype).reshape(-1)
        header[SECTION_TABLE_WORD + 2 * index] = offset
        header[SECTION_TABLE_WORD + 2 * index + 1] = array.size
        raw = array.view(np.uint8)
        parts.append(np.pad(raw, (0, -raw.size % 8)))
        offset += parts[-1].size
    header[4] = offset
    return Plan(np.concatenate(parts))


def build(
    trial: Trial, device: torch.device, dtype: torch.dtype, name: str = "triton", **options: Any
) -> Device:
    """Make a model; each weight is filled where it lies, the same in every backend."""
    chosen = BackendOptions(**{"max_graph_batch": trial.graph_rows, **options})
    backend = select_backend(device, dtype, name, chosen)
    config = trial.config
    rows = max(rows for rows, _ in trial.batches)
    room = max(
        rows * (-(-(have + 2 * trial.num_steps + QUEUED_STEPS) // PAGE_SIZE))
        for rows, have in trial.batches
    )
    torch.manual_seed(SEED)
    with torch.inference_mode():
        model = Decoder(config, backend, config.max_position, False)
        for _, handle in model.weights():
            _randomise(handle, device)
    kv = KvSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=room + 1,
        page_size=PAGE_SIZE,
    )
    sizes = ProgramSizes(kv=kv, num_slots=rows, max_context_len=config.max_position)
    if isinstance(backend, ProgramBackend):
        program = backend.create_program(model.forward, sizes)
    else:
        program = OperationProgram(model, backend, sizes)
    read = sum(handle.num_bytes for name, handle in model.weights() if "embed" not in name)
    return Device(program, read)


def _randomise(handle: Any, device: torch.device) -> None:
    for part, shape in handle.shapes.items():
        if len(shape) == 1:
            handle.load(part, torch.ones(shape, device=device))
        else:
            values = torch.randn(shape, device=device, dtype=torch.float32)
            handle.load(part, values.mul_(shape[-1] ** -0.5))


class Decoding:
    """Plans of rows that each get a token per step."""

    def __init__(self, rows: int, have: int, steps: int, temperature: float) -> None:
        self._rows = np.arange(rows)
        self._have = have
        self._pages = -(-(have + steps) // PAGE_SIZE)
        self._temperature = temperature
        self._step = 0

    def next(self) -> Plan:
        """The next step's plan; the first one opens the slots."""
        rows = self._rows
        computed = self._have + self._step
        ones = np.ones_like(rows)
        sections: dict[str, Any] = {
            "row_slot": rows,
            "row_query_len": ones,
            "row_computed_len": ones * computed,
            "row_token_source": ones * (self._step > 0),
            "token_ids": ones * (0 if self._step else 5),
            "positions": ones * computed,
            "logit_tokens": rows,
            "logit_top_n": ones * 0,
            "logit_flags": ones * 0,
            "score_offsets": np.zeros(rows.size + 1),
            "sample_logit": rows,
            "sample_slot": rows,
            "sample_position": ones * (computed + 1),
            "sample_flags": ones * 0,
        }
        if self._step == 0:
            sections |= self._opened()
        self._step += 1
        return make_plan(self._step, sections)

    def _opened(self) -> dict[str, Any]:
        rows = self._rows
        nothing = np.zeros(rows.size + 1)
        floats = np.tile([self._temperature, 1.0, 0, 0, 0, 1.0, 0, 0], (rows.size, 1))
        pages = np.arange(rows.size * self._pages) + 1
        index = np.tile(np.arange(self._pages), rows.size)
        owner = np.repeat(rows, self._pages)
        return {
            "closed_slots": rows,
            "opened_slots": rows,
            "opened_float": floats,
            "opened_int": np.zeros((rows.size, 8)),
            "opened_seed": rows,
            "bias_offsets": nothing,
            "suppressed_offsets": nothing,
            "output_offsets": nothing,
            "page_writes": np.stack([owner * 0, owner, index, pages], 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What some decode steps gave and took."""

    tokens: list[list[int]]
    step_s: float
    host_s: float  # of it the host was busy launching
    gap: float  # share of the time beyond what the device alone takes; 0 where that is not known


def decode(
    made: Device, rows: int, have: int, steps: int, *, overlap: bool, temperature: float = 0.0
) -> Run:
    """Run `steps` decode steps, behind as many that are not timed."""
    plans = Decoding(rows, have, 2 * steps + QUEUED_STEPS, temperature)
    tokens = []
    for _ in range(steps):
        made.program.forward(plan := plans.next())
        tokens.append(_tokens(made.program.sample(plan).wait()))
    device_s = _device_s(made, plans) if torch.cuda.is_available() else None
    busy = 0.0
    pending = None
    started_at = time.perf_counter()
    for _ in range(steps):
        launched_at = time.perf_counter()
        made.program.forward(plan := plans.next())
        result = made.program.sample(plan)
        busy += time.perf_counter() - launched_at
        if not overlap:
            tokens.append(_tokens(result.wait()))
            continue
        if pending is not None:
            tokens.append(_tokens(pending.wait()))
        pending = result
    if pending is not None:
        tokens.append(_tokens(pending.wait()))
    elapsed = time.perf_counter() - started_at
    gap = 0.0 if device_s is None else max(0.0, 1 - device_s * steps / elapsed)
    return Run(tokens=tokens, step_s=elapsed / steps, host_s=busy / steps, gap=gap)


def _device_s(made: Device, plans: Decoding) -> float:
    """Time of a step on the device alone: it is launched while the device is busy with others."""
    marks, pending = [], []
    torch.cuda._sleep(BUSY_CYCLES)
    for _ in range(QUEUED_STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made.program.forward(plan := plans.next())
        pending.append(made.program.sample(plan))
        end.record()
        marks.append((begin, end))
    for result in pending:
        result.wait()
    torch.cuda.synchronize()
    return min(begin.elapsed_time(end) for begin, end in marks) / 1000


def _tokens(block: np.ndarray) -> list[int]:
    sections = decode_result(block)
    if sections["row_errors"].any():
        raise RuntimeError(f"rows failed: {sections['row_errors'].tolist()}")
    return [int(token) for token in sections["token_ids"]]


@contextmanager
def built(
    trial: Trial, device: torch.device, dtype: torch.dtype, name: str = "triton", **options: Any
) -> Iterator[Device]:
    """`build`, and its memory given back."""
    made: list[Device] = [build(trial, device, dtype, name, **options)]
    try:
        yield made[0]
    finally:
        made.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def roofline_s(made: Device, rows: int, have: int, ceilings: Ceilings) -> float:
    """The least time of a step: weights and the rows' keys and values are read once."""
    token_bytes = made.program.page_bytes / PAGE_SIZE
    work = rows * made.weight_bytes  # two operations per weight of two bytes
    moved = made.weight_bytes + rows * have * token_bytes
    return max(moved / ceilings.bytes_per_s, work / ceilings.operations_per_s)


def check_reference(report: Report, device: torch.device) -> None:
    """A small model in float32, decoding from empty keys: the reference backend's tokens."""
    runs = []
    for name in ("torch", "triton"):
        with built(SMALL, device, torch.float32, name) as made:
            runs.append(
                [
                    decode(made, *batch, SMALL.num_steps, overlap=False, temperature=temperature)
                    for batch in SMALL.batches
                    for temperature in (0.0, 0.8)
                ]
            )
    same = [_agreement(one, other) for one, other in zip(*runs, strict=True)]
    report.add(
        Finding(
            name="small model: tokens of the reference backend",
            passed=min(same) == 1.0,
            value=f"{min(same):.0%} of draws, greedy and at random",
        )
    )


def check_decoding(
    report: Report, device: torch.device, dtype: torch.dtype, trial: Trial, ceilings: Ceilings
) -> None:
    """Steps with graphs against the roofline; without graphs and without overlap; same tokens."""
    on_cuda = device.type == "cuda"
    small = trial.batches[:2]
    with built(trial, device, dtype) as made:
        runs = [
            _check_batch(report, made, trial, batch, ceilings, on_cuda) for batch in trial.batches
        ]
    expected = runs[:2]
    with built(trial, device, dtype, max_graph_batch=0) as made:
        _compare(report, made, trial, small, expected, "launched one by one")
    with built(trial, device, dtype, deterministic=True) as made:
        _deterministic(report, made, trial, small, expected)


def _check_batch(
    report: Report,
    made: Device,
    trial: Trial,
    batch: tuple[int, int],
    ceilings: Ceilings,
    on_cuda: bool,
) -> Run:
    rows, have = batch
    least = roofline_s(made, rows, have, ceilings)
    together = decode(made, rows, have, trial.num_steps, overlap=True)
    alone = decode(made, rows, have, trial.num_steps, overlap=False)
    ratio = together.step_s / least
    is_goal = on_cuda and rows == 64
    report.add(
        Finding(
            name=f"decode, batch {rows} at {have}: step",
            passed=ratio <= 1.25 if is_goal else None,
            value=f"{1e3 * together.step_s:.2f} ms, {rows / together.step_s:.0f} tokens/s, "
            f"{ratio:.2f} x the roofline{', goal 1.25' if is_goal else ''}",
            figures={"step_s": together.step_s, "ratio": ratio, "host_s": together.host_s},
        )
    )
    report.add(
        Finding(
            name=f"decode, batch {rows} at {have}: idle between steps",
            passed=together.gap < 0.05 if on_cuda else None,
            value=f"{together.gap:.1%} of the time with overlap, {alone.gap:.1%} without, goal 5%",
            figures={"with_overlap": together.gap, "without": alone.gap},
        )
    )
    report.add(
        Finding(
            name=f"decode, batch {rows} at {have}: overlap",
            passed=together.tokens == alone.tokens,
            value=f"{alone.step_s / together.step_s:.2f} x as fast as without, host busy "
            f"{together.host_s / together.step_s:.0%} of a step, same tokens: "
            f"{together.tokens == alone.tokens}",
            figures={"without_s": alone.step_s},
        )
    )
    return together


def _compare(
    report: Report,
    made: Device,
    trial: Trial,
    batches: Sequence[tuple[int, int]],
    expected: list[Run],
    how: str,
) -> None:
    for (rows, have), run in zip(batches, expected, strict=True):
        other = decode(made, rows, have, trial.num_steps, overlap=True)
        report.add(
            Finding(
                name=f"decode, batch {rows} at {have}: {how}",
                passed=None,
                value=f"{1e3 * other.step_s:.2f} ms, {other.step_s / run.step_s:.2f} x as long; "
                f"same tokens in {_agreement(run, other):.0%} of draws",
                figures={"step_s": other.step_s, "agreement": _agreement(run, other)},
            )
        )


def _deterministic(
    report: Report,
    made: Device,
    trial: Trial,
    batches: Sequence[tuple[int, int]],
    expected: list[Run],
) -> None:
    """The first row's tokens in a batch of one and in a batch of many: the same."""
    _compare(report, made, trial, batches, expected, "deterministic")
    have = batches[0][1]
    runs = [
        decode(made, rows, have, trial.num_steps, overlap=True, temperature=1.0)
        for rows in (1, min(8, max(rows for rows, _ in trial.batches)))
    ]
    alone, together = ([step[0] for step in run.tokens] for run in runs)
    report.add(
        Finding(
            name="deterministic: alone and in a batch",
            passed=alone == together,
            value=f"{sum(a == b for a, b in zip(alone, together, strict=True))} of {len(alone)} "
            "tokens are the same",
        )
    )


def _agreement(one: Run, other: Run) -> float:
    pairs = [
        a == b
        for left, right in zip(one.tokens, other.tokens, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    return sum(pairs) / len(pairs)
