"""Turns the life of one job into metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trunkline.engine.client import Sample, Stream
from trunkline.engine.outputs import first_token_ts
from trunkline.server.metrics import Metrics


class Meter:
    """Follows a job's samples; `close` counts it, once, however it ended.

    `accepted` is to be set when the engine has taken the job: what it refused is not counted.
    """

    def __init__(self, metrics: Metrics, streams: Sequence[Stream], is_streaming: bool) -> None:
        self._metrics = metrics
        self._streams = streams
        self._is_streaming = is_streaming
        self.accepted = False
        self._last_seen: dict[Sample, float] = {}

    def seen(self, stream: Stream, sample: Sample, new_tokens: int) -> None:
        """Observe latencies after `new_tokens` of a sample came in."""
        now = sample.finished_ts or time.time()
        last = self._last_seen.get(sample)
        if last is None:
            first = first_token_ts(sample, streamed=self._is_streaming)
            if first is None:
                return
            latency = first - stream.request.received_ts
            self._observe("time_to_first_token_seconds", latency)
            last, new_tokens = first, new_tokens - 1
        if new_tokens > 0:
            gap = (now - last) / new_tokens
            self._observe("inter_token_latency_seconds", gap, new_tokens)
        self._last_seen[sample] = now

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._metrics.observe(name, value, self._is_streaming, times)

    def close(self) -> None:
        """Count every request of the job."""
        if self.accepted:
            for stream in self._streams:
                self._close(stream)

    def _close(self, stream: Stream) -> None:
        metrics, streaming = self._metrics, str(self._is_streaming).lower()
        ends = [sample.finished for sample in stream.samples]
        if not any(sample.started or sample.output_ids for sample in stream.samples):
            metrics.count("num_aborted_requests_total", 1)
            return
        metrics.count("prompt_tokens_total", len(stream.request.prompt_ids), streaming)
        generated = sum(len(sample.output_ids) for sample in stream.samples)
        metrics.count("generation_tokens_total", generated, streaming)
        started = stream.samples[0].started
        if started is not None:
            metrics.count("cached_tokens_total", started.cached_device, "device")
            metrics.count("cached_tokens_total", started.cached_host, "host")
            self._count_rank(stream, started.cached_device + started.cached_host)
        if any(end is None or end.reason in ("abort", "error") for end in ends):
            metrics.count("num_aborted_requests_total", 1)
            return
        metrics.count("num_requests_total", 1, streaming)
        finished_ts = max(sample.finished_ts or 0.0 for sample in stream.samples)
        self._observe("e2e_request_latency_seconds", finished_ts - stream.request.received_ts)
        self._observe("queue_time_seconds", max(end.queue_time for end in ends if end))
        self._time_per_token(stream, finished_ts)

    def _count_rank(self, stream: Stream, found: int) -> None:
        if stream.dp_rank is not None:
            rank = str(stream.dp_rank)
            self._metrics.count("dp_requests_total", 1, rank)
            accounts = (("predicted", stream.predicted_cached), ("found", found))
            for account, tokens in accounts:
                self._metrics.count("dp_cached_tokens_total", tokens, rank, account)

    def _time_per_token(self, stream: Stream, finished_ts: float) -> None:
        for sample in stream.samples:
            first = first_token_ts(sample, streamed=self._is_streaming)
            if first is not None and len(sample.output_ids) > 1:
                mean = (finished_ts - first) / (len(sample.output_ids) - 1)
                self._observe("request_time_per_output_token_seconds", mean)
