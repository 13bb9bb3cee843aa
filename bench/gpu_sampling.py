"""Drawing tokens on the device: the reference sampler's ids, and how fast. For `gpu_check.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from gpu_timing import Ceilings, Finding, Report, seconds

from trunkline.kernels import SampleInputs
from trunkline.kernels.torch_reference.sampler import sample as reference_sample
from trunkline.kernels.triton.sample import Samples, SlotTables, draw
from trunkline.kernels.triton.stepwise import sample

COLUMNS = 8


def _inputs(rows: int) -> SampleInputs:
    """Greedy samples, one per row of logits."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    none_i, none_f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return SampleInputs(
        logit_index=np.arange(rows, dtype=np.int32),
        temperature=zeros,
        top_p=ones,
        min_p=zeros,
        top_k=np.zeros(rows, np.int32),
        seed=np.arange(rows, dtype=np.int64) * 7919,
        position=np.arange(rows, dtype=np.int32),
        counted_rows=none_i,
        counted_ids=none_i,
        counts=none_f,
        frequency_penalty=zeros,
        presence_penalty=zeros,
        repetition_penalty=ones,
        suppressed_rows=none_i,
        suppressed_ids=none_i,
        bias_rows=none_i,
        bias_ids=none_i,
        bias_values=none_f,
        logprob_rows=none_i,
        top_n=np.zeros(rows, np.int32),
        score_offsets=np.zeros(rows + 1, np.int32),
        score_ids=none_i,
    )


def check_draws(
    report: Report, device: torch.device, rows: int, vocabulary: int, ceilings: Ceilings
) -> None:
    """Greedy, with a temperature, and cut by top-k and top-p."""
    logits = torch.randn((rows, vocabulary), device=device) * 4
    plain = _inputs(rows)
    full = np.full(rows, 0.8, np.float32)
    random = replace(plain, temperature=full)
    cut = replace(random, top_k=np.full(rows, 50, np.int32), top_p=full)
    for name, inputs in (("greedy", plain), ("temperature", random), ("top-k and top-p", cut)):
        got, expected = sample(logits, inputs), reference_sample(logits, inputs)
        same = int((got.token_ids == expected.token_ids).sum())
        report.add(
            Finding(
                name=f"draw, {name}: correct",
                passed=same == rows,
                value=f"{same} of {rows} tokens are the reference's",
            )
        )
        elapsed = seconds(_drawing(logits, inputs), device)
        share = logits.nbytes / elapsed / ceilings.bytes_per_s
        report.add(
            Finding(
                name=f"draw, {name}, {rows} x {vocabulary}: speed",
                passed=None,
                value=f"{1e6 * elapsed:.0f} us, {share:.0%} of the copy bandwidth",
                figures={"seconds": elapsed, "share": share},
            )
        )


def _drawing(logits: torch.Tensor, inputs: SampleInputs) -> Callable[[], object]:
    """The launches of a captured draw."""
    rows = inputs.logit_index.size
    device = logits.device
    index = torch.arange(rows, dtype=torch.int32, device=device)
    floats = np.zeros((rows, COLUMNS), np.float32)
    floats[:, 0], floats[:, 1], floats[:, 5] = inputs.temperature, inputs.top_p, 1.0
    ints = np.zeros((rows, COLUMNS), np.int32)
    ints[:, 0] = inputs.top_k
    tables = SlotTables(
        floats=torch.from_numpy(floats).to(device),
        ints=torch.from_numpy(ints).to(device),
        seeds=torch.from_numpy(inputs.seed).to(device),
    )
    samples = Samples(logit_index=index, slots=index, positions=index)
    return lambda: draw(logits, samples, tables)
