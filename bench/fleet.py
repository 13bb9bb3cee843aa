"""Which router policy serves a fleet best?

Simulates a fleet of engines behind routers: policies, load accounts, prefix index, schedulers and
prefix trees are the production code (`rust/router`, `rust/scheduler`, `rust/radix_tree`), and only
the duration of a step is modelled (docs/fleet.md). Prints a table, writes JSON and plots.

    python bench/fleet.py --traces DIR --trace conversation --loads 0.4 0.6 0.8
    python bench/fleet.py --trace generated --replicas --slo-s 2
    python bench/fleet.py --traces DIR --workers 4096 --copies 16 --loads 0.6

Load is the time that all prompts would take without any cache, per engine and second: beyond 1 a
fleet needs its caches to keep up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fleet_traces
from fleet_traces import Trace

from trunkline._core import simulate_fleet

POLICIES = (
    "cache_aware",
    "sglang_threshold",
    "vllm_router",
    "prefix_hash",
    "least_load",
    "power_of_two",
    "round_robin",
    "random",
)
BASELINES = ("sglang_threshold", "vllm_router")  # they take no settings of production's
# An 8B model on one H200, from data sheets: see `StepTime` in rust/router/src/sim/step_time.rs.
H200_8B = {
    "fixed_s": 6e-3,
    "prompt_token_s": 40e-6,
    "decode_row_s": 15e-6,
    "decode_context_s": 33e-9,
    "prompt_pair_s": 1.3e-9,
}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated, whatever the load and the policy."""

    trace: Trace
    workers: int
    settings: Json
    step_time: dict[str, float]
    copies: int
    seeds: int

    def speed(self, load: float) -> float:
        """How much faster the trace must run to offer this load."""
        alone_s = sum(self._alone_s(tokens) for tokens in self.trace.prompt_tokens)
        return load * self.workers * self.trace.span_s / (alone_s * self.copies)

    def _alone_s(self, tokens: int) -> float:
        time_of = self.step_time
        pairs = tokens * (tokens + 1) / 2
        prompt_s = time_of["prompt_token_s"] * tokens + time_of["prompt_pair_s"] * pairs
        return time_of["fixed_s"] + prompt_s

    def run(self, policy: str, speed: float) -> Json:
        """Figures of one policy: medians over the seeds, and the seeds' own."""
        runs = [self._run(policy, speed, seed) for seed in range(self.seeds)]
        return {"policy": policy, "workers": self.workers, **_medians(runs), "seeds": runs}

    def _run(self, policy: str, speed: float, seed: int) -> Json:
        router = self.settings["router"] if policy not in BASELINES else {}
        config = {
            **self.settings,
            "router": router,
            "workers": self.workers,
            "policy": policy,
            "step_time": self.step_time,
            "block_tokens": self.trace.block_tokens,
            "spread_s": self.trace.spread_s,
            "copies": self.copies,
            "speed": speed,
            "seed": seed,
        }
        started_at = time.monotonic()
        figures = json.loads(simulate_fleet(json.dumps(config).encode(), self.trace.lines))
        return {**figures, "wall_s": time.monotonic() - started_at}


def _medians(runs: list[Json]) -> Json:
    """Medians of every figure, also inside groups; curves and windows are the first run's."""
    first = runs[0]
    medians: Json = {}
    for name, value in first.items():
        values = [run[name] for run in runs]
        if isinstance(value, dict):
            medians[name] = _medians(values)
        elif isinstance(value, list):
            medians[name] = value
        else:
            medians[name] = statistics.median(values)
    return medians


COLUMNS = (
    ("policy", 18), ("load", 6), ("rate/s", 8), ("hit", 7), ("of ideal", 9), ("TTFT mean", 10),
    ("p50", 8), ("p99", 8), ("ITL p50", 8), ("queue", 7), ("busiest", 8), ("done", 9),
    ("x mean", 7),
)  # fmt: skip


def print_header() -> None:
    """The table's first line."""
    print("".join(f"{name:>{width}}" for name, width in COLUMNS))


def print_row(result: Json, best_mean_s: float) -> None:
    """One policy at one load; `x mean` is its mean TTFT over that of the first policy."""
    ttft = result["ttft_s"]
    ideal = result["ideal_hit_rate"]
    cells = (
        result["policy"],
        f"{result['offered_load']:.2f}",
        f"{result['offered_rate']:.1f}",
        f"{result['hit_rate']:.3f}",
        f"{result['hit_rate'] / ideal:.0%}" if ideal else "-",
        f"{ttft['mean']:.3f}",
        f"{ttft['p50']:.3f}",
        f"{ttft['p99']:.2f}",
        f"{1000 * result['inter_token_s']['p50']:.1f}ms",
        f"{result['queue_mean']:.2f}",
        f"{result['busy_imbalance']:.2f}",
        f"{result['completed'] / result['requests']:.2%}",
        f"{ttft['mean'] / best_mean_s:.2f}" if best_mean_s else "-",
    )
    widths = [width for _, width in COLUMNS]
    print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def sweep(fleet: Fleet, policies: list[str], loads: list[float], threads: int) -> list[Json]:
    """Every policy at every load."""
    cases = [(policy, load) for load in loads for policy in policies]
    results = []
    print_header()
    with ThreadPoolExecutor(threads) as pool:
        runs = pool.map(lambda case: fleet.run(case[0], fleet.speed(case[1])), cases)
        for (policy, load), result in zip(cases, runs, strict=True):
            if policy == policies[0]:
                first_mean_s = result["ttft_s"]["mean"]
            print_row(result, first_mean_s)
            sys.stdout.flush()
            results.append({"load": load, **result})
    return results


def replicas(fleet: Fleet, policies: list[str], load: float, slo: Json, most: int) -> list[Json]:
    """The fewest workers with which each policy meets the objective, at the rate of `load`."""
    speed = fleet.speed(load)
    results = []
    for policy in policies:
        too_few, enough = 0, most
        figures: Json | None = None
        while enough - too_few > 1 or figures is None:
            workers = enough if figures is None else (too_few + enough) // 2
            result = replace(fleet, workers=workers).run(policy, speed)
            met = result["ttft_s"][slo["quantile"]] <= slo["seconds"]
            if met:
                enough, figures = workers, result
            elif figures is None:
                break
            else:
                too_few = workers
        needed = enough if figures else None
        print(f"{policy:>18} {needed or f'more than {most}':>14}", flush=True)
        results.append({"policy": policy, "workers": needed, "figures": figures})
    return results


def arguments_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(fleet_traces.NAMES)
    parser.add_argument("--trace", default="generated", help=f"{names}, or a path")
    parser.add_argument("--traces", type=Path, help="directory with the public traces")
    parser.add_argument("--block-tokens", type=int, default=512, help="blocks of a trace by path")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--loads", nargs="+", type=float, default=[0.3, 0.5, 0.7])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1, help="of the trace, at once, unrelated")
    parser.add_argument("--seeds", type=int, default=1, help="runs per case; medians are shown")
    parser.add_argument("--step-time", type=Path, help="JSON of bench/fit_steps.py; default: H200")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON of engine settings")
    parser.add_argument(
        "--router", type=json.loads, default={}, help="JSON of settings of production's policies"
    )
    parser.add_argument("--no-reports", action="store_true", help="engines do not tell their load")
    parser.add_argument("--report-delay", type=float, default=0.02, help="seconds")
    parser.add_argument("--fail", type=float, default=0.0, help="part of the workers that die")
    parser.add_argument("--down-s", type=float, default=30.0, help="for so long")
    parser.add_argument("--replicas", action="store_true", help="workers needed for the objective")
    parser.add_argument("--most-replicas", type=int, default=128)
    parser.add_argument("--slo-s", type=float, default=2.0, help="objective: seconds of TTFT")
    parser.add_argument("--slo-quantile", default="p90", choices=("mean", "p50", "p90", "p99"))
    parser.add_argument("--threads", type=int, default=1, help="simulations at a time")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--plots", type=Path, help="directory for SVG plots (needs matplotlib)")
    return parser


def fleet_of(arguments: argparse.Namespace) -> Fleet:
    """What the command line describes."""
    trace = fleet_traces.load(arguments.trace, arguments.traces, arguments.block_tokens)
    step_time = H200_8B
    if arguments.step_time:
        step_time = json.loads(arguments.step_time.read_text())["step_time"]
    reports = {"enabled": not arguments.no_reports, "delay_s": arguments.report_delay}
    settings = {
        "routers": arguments.routers,
        "reports": reports,
        "engine": arguments.engine,
        "router": arguments.router,
    }
    return Fleet(trace, arguments.workers, settings, step_time, arguments.copies, arguments.seeds)


def with_failures(fleet: Fleet, load: float, part: float, down_s: float) -> Fleet:
    """The same fleet, of which a part dies a third of the way."""
    at_s = fleet.trace.span_s / fleet.speed(load) / 3
    dead = range(round(part * fleet.workers))
    failures = [{"worker": worker, "at_s": at_s, "down_s": down_s} for worker in dead]
    return replace(fleet, settings={**fleet.settings, "failures": failures})


def main() -> None:
    arguments = arguments_parser().parse_args()
    fleet = fleet_of(arguments)
    report: Json = {"trace": fleet.trace.name, "step_time": fleet.step_time, "arguments": sys.argv}
    print(
        f"{fleet.trace.name}: {len(fleet.trace.prompt_tokens)} requests x {fleet.copies}, "
        f"{fleet.workers} workers, {arguments.routers} routers"
    )
    if arguments.fail:
        fleet = with_failures(fleet, arguments.loads[0], arguments.fail, arguments.down_s)
    if arguments.replicas:
        slo = {"quantile": arguments.slo_quantile, "seconds": arguments.slo_s}
        print(f"replicas for TTFT {slo['quantile']} <= {slo['seconds']} s")
        report["slo"] = slo
        load, most = arguments.loads[0], arguments.most_replicas
        report["replicas"] = replicas(fleet, arguments.policies, load, slo, most)
    else:
        threads = arguments.threads
        report["sweep"] = sweep(fleet, arguments.policies, arguments.loads, threads)
    if arguments.json:
        arguments.json.write_text(json.dumps(report))
    if arguments.plots:
        import fleet_plots

        for path in fleet_plots.draw(report, arguments.plots):
            print(path)


if __name__ == "__main__":
    main()
