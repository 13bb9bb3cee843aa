"""Tables of what `cpu_serving.py` measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
DISTURBED = 1 / 12  # share of the machine that other processes took while an engine was measured
INPUT_BOUND = ("W4",)  # its outputs are few: what counts is how fast prompts are computed


def is_disturbed(record: Json) -> bool:
    """Whether a run tells more of other processes than of its engine."""
    return bool(record["others_share"] > DISTURBED)


def medians(records: list[Json]) -> list[Json]:
    """One record for each engine and workload: medians over its repetitions, field by field.

    Disturbed runs are left out.
    """
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for record in records:
        if is_disturbed(record):
            continue
        names = ("model", "workload", "engine", "threads")
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return [_median(group) for group in groups.values()]


def _median(group: list[Json]) -> Json:
    def over(values: Callable[[Json], Json]) -> Json:
        return {
            name: statistics.median(values(record)[name] for record in group)
            for name, value in values(group[0]).items()
            if isinstance(value, int | float)
        }

    result, machine = over(lambda one: one["result"]), over(lambda one: one["machine"])
    return {**group[0], "result": result, "machine": machine, "count": len(group)}


def figure_of_merit(record: Json) -> float:
    """What an engine is compared by."""
    unit = "input" if record["workload"] in INPUT_BOUND else "output"
    value: float = record["result"][f"{unit}_tokens_per_s"]
    return value


def _is_peer_of(ours: Json, other: Json) -> bool:
    same = all(ours[name] == other[name] for name in ("model", "workload", "threads"))
    variant = ours["engine"].partition("-")[2].replace("int8", "q8_0")
    return (
        same
        and not other["engine"].startswith("ours")
        and other["engine"].partition("-")[2] == variant
    )


def ratio(record: Json, table: list[Json]) -> str:
    """How many times the best peer at the same precision."""
    peers = [other for other in table if _is_peer_of(record, other)]
    if not record["engine"].startswith("ours") or not peers:
        return ""
    best = max(peers, key=figure_of_merit)
    return f"{figure_of_merit(record) / figure_of_merit(best):.2f}x {best['engine']}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _order(record: Json) -> tuple[Any, ...]:
    workload = record["workload"]
    return record["model"], record["threads"], workload[0] == "C", workload[0], int(workload[1:])


def print_report(records: list[Json]) -> None:
    """Versions, then a table for each model and number of threads."""
    table = sorted(medians(records), key=_order)
    for text in sorted({f"{one['engine']}: {one['version']}, `{one['command']}`" for one in table}):
        print(f"* {text}")
    fields = (
        *("requests_per_s", "input_tokens_per_s", "output_tokens_per_s"),
        *("first_token_p50_ms", "first_token_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms"),
    )
    header = (
        "engine | n | req/s | in tok/s | out tok/s | TTFT p50 ms | p99 | ITL p50 ms | p99 "
        "| best peer | read GB/s | peak GFLOP/s | load"
    )
    title = None
    for one in table:
        if (one["model"], one["threads"]) != title:
            title = one["model"], one["threads"]
            print(f"\n{one['model']}, {one['threads']} threads\n\n| workload | {header} |")
            print("|---" * (header.count("|") + 2) + "|")
        figures = " | ".join(_number(one["result"][name]) for name in fields)
        machine = one["machine"]
        print(
            f"| {one['workload']} | {one['engine']} | {one['count']} | {figures} "
            f"| {ratio(one, table)} | {machine['read_gb_per_s']:.0f} "
            f"| {machine['peak_gflop_per_s']:.0f} | {machine['load_average']:.1f} |"
        )
