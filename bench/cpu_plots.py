"""The plot of `cpu_serving.py`: throughput against concurrency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: small files
matplotlib.rcParams["svg.hashsalt"] = "cpu"
from cpu_tables import medians  # noqa: E402
from matplotlib import pyplot  # noqa: E402


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Write the plot of the workloads C1 to C64 as SVG."""
    swept = [one for one in medians(records) if one["workload"].startswith("C")]
    figure, axis = pyplot.subplots(figsize=(6, 3.8))
    lines: dict[str, list[tuple[int, float]]] = {}
    for one in swept:
        point = int(one["workload"][1:]), one["result"]["output_tokens_per_s"]
        lines.setdefault(one["engine"], []).append(point)
    for engine, points in sorted(lines.items(), key=lambda line: line[0] != "ours"):
        at_once, rates = zip(*sorted(points), strict=True)
        axis.plot(at_once, rates, ".-", label=engine)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests at once (256 tokens in, 128 out)")
    axis.set_ylabel("output tokens/s")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
