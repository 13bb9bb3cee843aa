"""Plots of what `bench/fleet.py` found, as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: small files
matplotlib.rcParams["svg.hashsalt"] = "fleet"
from matplotlib import pyplot  # noqa: E402

Json = dict[str, Any]


def draw(report: Json, directory: Path) -> list[Path]:
    """Write the plots that the report has figures for; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    name = report["trace"]
    paths = []
    if "sweep" in report:
        paths.append(_sweep(report["sweep"], name, directory / f"fleet_{name}_sweep.svg"))
        if any(result["retries"] for result in report["sweep"]):
            paths.append(_recovery(report["sweep"], name, directory / f"fleet_{name}_failure.svg"))
    if "replicas" in report:
        paths.append(_replicas(report, name, directory / f"fleet_{name}_replicas.svg"))
    return paths


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _sweep(results: list[Json], name: str, path: Path) -> Path:
    """Mean and p99 TTFT and hit rate over the offered load."""
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for policy in dict.fromkeys(result["policy"] for result in results):
        own = [result for result in results if result["policy"] == policy]
        loads = [result["offered_load"] for result in own]
        axes[0].plot(loads, [result["ttft_s"]["mean"] for result in own], ".-", label=policy)
        axes[1].plot(loads, [result["ttft_s"]["p99"] for result in own], ".-")
        axes[2].plot(loads, [result["hit_rate"] for result in own], ".-")
    axes[2].axhline(results[0]["ideal_hit_rate"], color="grey", linestyle=":")
    titles = ("TTFT mean, s", "TTFT p99, s", "hit rate (dotted: ideal)")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(f"{name}: {title}", fontsize=9)
        axis.set_xlabel("offered load")
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=6)
    return _save(figure, path)


def _recovery(results: list[Json], name: str, path: Path) -> Path:
    """Hit rate and TTFT over time, around a loss of workers, at the first load."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    first = [result for result in results if result["load"] == results[0]["load"]]
    for result in first:
        windows = result["windows"]
        starts = [window["start_s"] for window in windows]
        axes[0].plot(starts, [window["hit_rate"] for window in windows], label=result["policy"])
        axes[1].plot(starts, [window["ttft_mean_s"] for window in windows])
    for axis, title in zip(axes, ("hit rate", "TTFT mean, s"), strict=True):
        axis.set_title(f"{name}: {title}", fontsize=9)
        axis.set_xlabel("seconds")
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=6)
    return _save(figure, path)


def _replicas(report: Json, name: str, path: Path) -> Path:
    """Workers needed at the objective."""
    met = [result for result in report["replicas"] if result["workers"]]
    figure, axis = pyplot.subplots(figsize=(6, 3))
    axis.barh([result["policy"] for result in met], [result["workers"] for result in met])
    axis.invert_yaxis()
    slo = report["slo"]
    axis.set_title(f"{name}: workers for TTFT {slo['quantile']} <= {slo['seconds']} s", fontsize=9)
    return _save(figure, path)
