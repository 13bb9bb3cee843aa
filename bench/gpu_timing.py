"""Timing on a device, its ceilings, and findings as they are reported; for `gpu_check.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

BUSY_CYCLES = 2_000_000  # about 1 ms, in which the host launches what is timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `goal` and `reached` are shares of a ceiling, or a bound."""

    name: str
    passed: bool | None  # None: measured, nothing to pass
    value: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """What was found, printed as it comes."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Keep a finding and print its line."""
        self.findings.append(finding)
        mark = {True: "ok", False: "FAIL", None: "-"}[finding.passed]
        print(f"{mark:>4}  {finding.name:<44} {finding.value}", flush=True)

    @property
    def passed(self) -> bool:
        """Nothing failed."""
        return all(finding.passed is not False for finding in self.findings)

    def as_json(self) -> list[dict[str, Any]]:
        """All findings as plain data."""
        return [asdict(finding) for finding in self.findings]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that this device reaches with torch's own copy and matrix product."""

    bytes_per_s: float
    operations_per_s: float


def seconds(work: Callable[[], object], device: torch.device, runs: int = 20) -> float:
    """Median time of a launch, on the device's own clock where it has one."""
    for _ in range(3 if device.type == "cuda" else 1):
        work()
    if device.type != "cuda":
        started_at = time.perf_counter()
        work()
        return time.perf_counter() - started_at
    # Each run reads what the last one's writes have pushed out of the cache.
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    times = []
    for _ in range(runs):
        flush.zero_()
        torch.cuda._sleep(BUSY_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy a large buffer, multiply large matrices."""
    on_cuda = device.type == "cuda"
    num_bytes = (2 << 30) if on_cuda else (1 << 22)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), device)
    side = 8192 if on_cuda else 128
    left = torch.randn((side, side), device=device).to(dtype)
    right = torch.randn((side, side), device=device).to(dtype)
    multiplied = seconds(lambda: left @ right, device)
    return Ceilings(2 * num_bytes / copied, 2 * side**3 / multiplied)
