"""The engine's periodic log lines, from differences of the scheduler's counters.

Operators' scripts parse these lines: `Prefill batch. ...` when prompts were computed, at most one
per second, and `Decode batch. ...` every so many steps. Nothing is lost between two lines: each
tells what happened since the one before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

PREFILL_INTERVAL_S: Final = 1.0
LOOK_INTERVAL_S: Final = 0.1  # gathering the counters costs more than a turn of the loop may

Stats = dict[str, float]


class StepLog:
    """Follows one scheduler. `step` is called once per turn of the loop.

    `gen_throughput` is that of the last decode line, whether or not it was logged; 0 when idle.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        interval_steps: int,
        max_total_tokens: int,
        logger: logging.Logger,
    ) -> None:
        self._logger = logger
        self._stats = stats
        self._interval_steps = interval_steps
        self._max_total_tokens = max_total_tokens
        self._steps = 0
        self._last_prefill = stats()
        self._last_decode = self._last_prefill
        self._last_retraction = self._last_prefill
        self._next_look_at = 0.0
        self._last_decode_at = time.monotonic()
        self.gen_throughput = 0.0

    def step(self, *, idle: bool) -> None:
        """Count a step (or, idle, none) and write the lines that are due."""
        if idle:
            self.gen_throughput = 0.0
        now = time.monotonic()
        self._steps += not idle
        decode_due = not idle and self._steps % self._interval_steps == 0
        prefill_due = now >= self._next_look_at
        if not decode_due and not prefill_due:
            return
        stats = self._stats()
        if prefill_due:
            self._prefill(stats, now)
            self._retraction(stats)
        if decode_due:
            self._decode(stats, now)

    def _prefill(self, stats: Stats, now: float) -> None:
        new_tokens = self._since(self._last_prefill, stats, "prompt_tokens_total")
        cached = self._since(self._last_prefill, stats, "cached_tokens_total")
        self._next_look_at = now + (PREFILL_INTERVAL_S if new_tokens else LOOK_INTERVAL_S)
        if new_tokens == 0:
            return
        all_cached = stats["cached_tokens_total"]
        all_tokens = all_cached + stats["prompt_tokens_total"]
        self._logger.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, "
            "cache hit rate: %.2f%%, token usage: %.2f, #running-req: %d, #queue-req: %d",
            self._since(self._last_prefill, stats, "admitted_sequences_total"),
            new_tokens,
            cached,
            100 * all_cached / all_tokens,
            stats["used_tokens"] / self._max_total_tokens,
            stats["num_running"],
            stats["num_waiting"],
        )
        self._last_prefill = stats

    def _decode(self, stats: Stats, now: float) -> None:
        tokens = self._since(self._last_decode, stats, "generated_tokens_total")
        elapsed = now - self._last_decode_at
        self.gen_throughput = tokens / elapsed if elapsed > 0 else 0.0
        if tokens > 0:
            self._logger.info(
                "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, "
                "gen throughput (token/s): %.2f, #queue-req: %d",
                stats["num_running"],
                stats["used_tokens"],
                stats["used_tokens"] / self._max_total_tokens,
                self.gen_throughput,
                stats["num_waiting"],
            )
        self._last_decode, self._last_decode_at = stats, now

    def _retraction(self, stats: Stats) -> None:
        retracted = self._since(self._last_retraction, stats, "retracted_requests_total")
        if retracted > 0:
            self._logger.info(
                "KV cache pool is full. Retract requests. #retracted_reqs: %d, "
                "#new_token_ratio: %.4f -> %.4f",
                retracted,
                self._last_retraction["new_token_ratio"],
                stats["new_token_ratio"],
            )
        self._last_retraction = stats

    @staticmethod
    def _since(earlier: Stats, later: Stats, name: str) -> float:
        return later[name] - earlier[name]
