"""What /metrics shows: the life of requests as this process sees it, and the engine's own figures.

A registry per app. Each metric is written as `engine_<name>`, and with the compatibility switch as
`sglang:<name>` too. Knows nothing of HTTP handlers or of how the engine is asked for its figures.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

_SECONDS: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_TOKEN_SECONDS: Final = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
_QUEUE_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3000)
HISTOGRAMS: Final[Mapping[str, tuple[str, Sequence[float]]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of a sample.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a sample.",
        _TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": (
        "Time from a request's arrival to its end.",
        (*_SECONDS, 600, 1200, 1800, 2400),
    ),
    "queue_time_seconds": ("Time that a request waited to be scheduled.", _QUEUE_SECONDS),
}
COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "prompt_tokens_total": ("Prompt tokens of finished requests.", ("is_streaming",)),
    "generation_tokens_total": ("Generated tokens of finished requests.", ("is_streaming",)),
    "cached_tokens_total": ("Prompt tokens found in the prefix cache.", ("cache_source",)),
    "dp_requests_total": ("Requests by the engine that ran them, of several.", ("dp_rank",)),
    "dp_cached_tokens_total": (
        "Cached prompt tokens that the choice of an engine reckoned with, and that it found.",
        ("dp_rank", "account"),
    ),
    "num_requests_total": ("Finished requests.", ("is_streaming",)),
    "batch_requests_total": ("Lines of batches that were answered.", ("outcome",)),
    "num_aborted_requests_total": ("Requests that were aborted before their end.", ()),
    "http_requests_total": ("HTTP requests received.", ("endpoint", "method")),
    "http_responses_total": ("HTTP responses sent.", ("endpoint", "status_code", "method")),
}
# The engine's figures by their name in `Core.stats` and in EngineFacts.
ENGINE_GAUGES: Final[Mapping[str, str]] = {
    "num_running_reqs": "Sequences running.",
    "num_queue_reqs": "Requests waiting.",
    "num_waiting_uncached_tokens": "Tokens of waiting prompts that are not cached.",
    "num_used_tokens": "KV pool tokens used by running requests.",
    "token_usage": "Share of the KV pool used by running requests.",
    "gen_throughput": "Tokens generated per second lately; 0 at rest.",
    "cache_hit_rate": "Share of prompt tokens found in the cache since start.",
    "kv_available_tokens": "KV pool tokens that are free.",
    "kv_evictable_tokens": "KV pool tokens cached and not in use.",
    "max_total_num_tokens": "Size of the KV pool in tokens.",
    "max_running_requests": "Most sequences in a step.",
    "new_token_ratio": "Share of the allowed new tokens that admission reckons with.",
    "context_len": "Longest sequence in tokens.",
    "grammar_queue": "Requests whose grammar is being compiled.",
    "grammar_cache_bytes": "Memory that compiled grammars take.",
}
ENGINE_COUNTERS: Final[Mapping[str, str]] = {
    "num_retracted_requests_total": "Requests that lost their pages and were queued again.",
    "evicted_tokens_total": "Cached tokens that were evicted.",
    "grammar_cache_hits_total": "Requests whose grammar was compiled, or being compiled, already.",
    "grammar_cache_misses_total": "Requests whose grammar had to be compiled.",
    "grammar_failures_total": "Grammars that could not be compiled.",
    "grammar_compile_seconds_total": "Time spent compiling grammars.",
}
_MODEL: Final = "model_name"
_RANK: Final = "dp_rank"
Labels = tuple[str, ...]
Counters = dict[str, dict[Labels, float]]


class Row(msgspec.Struct, frozen=True):
    """A counter's amount, or a histogram's counts per bucket and their sum, with these labels."""

    labels: Labels
    amount: float
    buckets: list[int] = []


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that one process has counted, by the names of `COUNTERS` and `HISTOGRAMS`."""

    counters: dict[str, list[Row]]
    histograms: dict[str, list[Row]]
    http_active: int


class _Distribution:
    """Counts per bucket. Several equal observations cost as much as one."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, row: Row) -> None:
        self.counts = [one + two for one, two in zip(self.counts, row.buckets, strict=True)]
        self.total += row.amount

    def buckets(self) -> list[tuple[str, float]]:
        running = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(float, self.bounds), math.inf), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if math.isinf(bound) else str(bound), running))
        return rows


@dataclass(slots=True)
class EngineFigures:
    """What one engine last told, by the names of `ENGINE_GAUGES` and `ENGINE_COUNTERS`.

    `told_ts` is when (unix seconds); `is_up` whether it can take requests.
    """

    rank: int
    values: dict[str, float] = field(default_factory=dict)
    told_ts: float = 0.0
    is_up: bool = False


class Metrics:
    """Counts and distributions of one app, and its engines' figures.

    Belongs to the app's asyncio loop. Where there are several engines, their figures are labelled
    with their rank.
    """

    def __init__(
        self, model_name: str, *, sglang_names: bool = False, num_engines: int = 1
    ) -> None:
        self._model_name = model_name
        self._prefixes = ("engine_", "sglang:") if sglang_names else ("engine_",)
        self._counters: Counters = {name: {} for name in COUNTERS}
        self._histograms: dict[str, dict[Labels, _Distribution]] = {n: {} for n in HISTOGRAMS}
        self._others: dict[int, Snapshot] = {}
        self.engines = [EngineFigures(rank) for rank in range(num_engines)]
        self.http_active = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        for name, (_, labels) in COUNTERS.items():
            if not labels:
                self._counters[name][()] = 0
        for name in HISTOGRAMS:
            for streaming in ("false", "true"):
                self._distribution(name, streaming)

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter of `COUNTERS`; `labels` in the order declared there."""
        rows = self._counters[name]
        rows[labels] = rows.get(labels, 0) + amount

    def observe(self, name: str, value: float, is_streaming: bool, times: int = 1) -> None:
        """Add `times` equal observations to a histogram of `HISTOGRAMS`."""
        if times > 0:
            self._distribution(name, str(is_streaming).lower()).observe(max(value, 0.0), times)

    def snapshot(self) -> Snapshot:
        """What this process has counted."""
        return Snapshot(
            counters={
                name: [Row(labels, amount) for labels, amount in rows.items()]
                for name, rows in self._counters.items()
            },
            histograms={
                name: [Row(labels, one.total, list(one.counts)) for labels, one in rows.items()]
                for name, rows in self._histograms.items()
            },
            http_active=self.http_active,
        )

    def include(self, process: int, snapshot: Snapshot) -> None:
        """Show what another process has counted so far, besides this one's."""
        self._others[process] = snapshot

    def ended(self, process: int) -> None:
        """The other process is gone; what it had counted becomes this one's."""
        last = self._others.pop(process, None)
        if last is None:
            return
        for name, rows in last.counters.items():
            for row in rows:
                self.count(name, row.amount, *row.labels)
        for name, rows in last.histograms.items():
            for row in rows:
                self._distribution(name, *row.labels).add(row)

    def _distribution(self, name: str, streaming: str) -> _Distribution:
        rows = self._histograms[name]
        if (streaming,) not in rows:
            rows[(streaming,)] = _Distribution(HISTOGRAMS[name][1])
        return rows[(streaming,)]

    def render(self) -> bytes:
        """The text that /metrics answers."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric, under each prefix (called by the registry)."""
        for prefix in self._prefixes:
            yield from self._gauges(prefix)
            yield from self._counter_families(prefix)
            yield from self._histogram_families(prefix)

    def _gauges(self, prefix: str) -> Iterator[Metric]:
        for name, text in ENGINE_GAUGES.items():
            values = self._told(name)
            if values:
                yield self._by_rank(GaugeMetricFamily, prefix + name, text, values)
        active = GaugeMetricFamily(
            prefix + "http_requests_active", "HTTP requests in progress.", labels=[_MODEL]
        )
        others = sum(one.http_active for one in self._others.values())
        active.add_metric([self._model_name], self.http_active + others)
        yield active
        up = [(one.rank, float(one.is_up)) for one in self.engines]
        text = "Whether the engine can take requests."
        yield self._by_rank(GaugeMetricFamily, prefix + "up", text, up)

    def _told(self, name: str) -> list[tuple[int, float]]:
        """A figure of the engines that have told it, by rank."""
        return [(one.rank, one.values[name]) for one in self.engines if name in one.values]

    def _by_rank(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Sequence[tuple[int, float]],
    ) -> Metric:
        several = len(self.engines) > 1
        family = kind(name, text, labels=[_MODEL, _RANK] if several else [_MODEL])
        for rank, value in values:
            family.add_metric([self._model_name, *([str(rank)] if several else [])], value)
        return family

    def _counter_families(self, prefix: str) -> Iterator[Metric]:
        for name, text in ENGINE_COUNTERS.items():
            values = self._told(name)
            if values:
                yield self._by_rank(CounterMetricFamily, prefix + name, text, values)
        for name, (text, labels) in COUNTERS.items():
            family = CounterMetricFamily(prefix + name, text, labels=[_MODEL, *labels])
            amounts = dict(self._counters[name])
            for row in (row for one in self._others.values() for row in one.counters[name]):
                amounts[row.labels] = amounts.get(row.labels, 0) + row.amount
            for label_values, amount in amounts.items():
                family.add_metric([self._model_name, *label_values], amount)
            yield family

    def _histogram_families(self, prefix: str) -> Iterator[Metric]:
        for name, (text, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(prefix + name, text, labels=[_MODEL, "is_streaming"])
            own = [Row(key, one.total, one.counts) for key, one in self._histograms[name].items()]
            sums: dict[Labels, _Distribution] = {}
            for row in (*own, *(r for one in self._others.values() for r in one.histograms[name])):
                sums.setdefault(row.labels, _Distribution(HISTOGRAMS[name][1])).add(row)
            for values, rows in sums.items():
                family.add_metric([self._model_name, *values], rows.buckets(), rows.total)
            yield family
