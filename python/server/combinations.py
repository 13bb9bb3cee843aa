"""What settings of `engine-serve` mean for each other: pure functions.

Those that contradict each other are refused; those that others leave without effect are named in
the log at the start. What depends on the model or the device is the engine's
(`engine/ineffective.py`), keys and TLS are those of `access_settings.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from trunkline.server.config import LogOptions, ServerConfig


def refuse_contradictions(config: ServerConfig) -> None:
    """Refuse what cannot be meant together.

    Raises:
        ValueError: there is such a thing; the message names the flags and the remedy.
    """
    parallel = config.engine.parallel
    by_cache = parallel.dp_size > 1 and parallel.load_balance_method == "cache_aware"
    if by_cache and config.engine.cache.disable_radix_cache:
        raise ValueError(
            "--load-balance-method cache_aware goes by what the engines have cached, but with "
            "--disable-radix-cache that is nothing; use total_tokens, or leave one of them out"
        )


def without_effect(config: ServerConfig) -> list[str]:
    """A sentence for each given setting that changes nothing. One at its default is not given."""
    return [f"{name} has no effect: {why}" for name, why in _ineffective(config)]


def _ineffective(config: ServerConfig) -> Iterator[tuple[str, str]]:
    parallel, logs = config.engine.parallel, config.logs
    if parallel.dp_size == 1 and parallel.load_balance_method != "auto":
        yield "load_balance_method", "there is one engine (dp_size is 1)"
    level = config.engine.log_level
    if not logs.log_requests:
        if logs.log_requests_level != LogOptions().log_requests_level:
            yield "log_requests_level", "log_requests is not given"
    elif _hides_lines(level):
        yield "log_requests", f"log_level {level!r} leaves its lines out"
    http_level = logs.log_level_http or level
    if logs.access_log_exclude_prefixes and _hides_lines(http_level):
        name = "log_level_http" if logs.log_level_http else "log_level"
        yield "access_log_exclude_prefixes", f"{name} {http_level!r} leaves all access lines out"


def _hides_lines(level: str) -> bool:
    """Whether what is written as information does not appear."""
    return int(getattr(logging, level.upper())) > logging.INFO
