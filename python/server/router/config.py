"""Settings of `engine-router`: defaults and help stand here, their meaning in `rust/router`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from trunkline.engine.config import setting

POLICIES = (
    *("cache_aware", "round_robin", "random", "power_of_two", "least_load", "session"),
    "prefix_hash",
)


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Clients."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(30080, "port to listen on; 0 takes a free one", minimum=0, maximum=65535)
    api_key: str | None = setting(
        None,
        "clients must send it as a bearer token (not to /health, /ready and /metrics)",
        env="TRUNKLINE_ROUTER_API_KEY",
        secret=True,
    )
    admin_api_key: str | None = setting(
        None,
        "whoever adds, drains or removes workers must send it as a bearer token; without it the "
        "workers are fixed",
        env="TRUNKLINE_ROUTER_ADMIN_API_KEY",
        secret=True,
    )
    max_body_bytes: int = setting(32 << 20, "largest request body; beyond it: 413", minimum=1)
    keep_alive_timeout_s: float = setting(
        65.0, "seconds after which an idle connection is closed", minimum=0.001
    )
    shutdown_grace_s: float = setting(
        30.0, "seconds that requests in flight get to finish after SIGTERM or SIGINT", minimum=0
    )
    reuse_port: bool = setting(
        False, "let another router listen on the same port: start the new one, then stop the old"
    )
    threads: int = setting(0, "threads that serve; 0: one per core, at most 16", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Workers."""

    worker_api_key: str | None = setting(
        None,
        "sent to the workers as a bearer token in place of the client's",
        env="TRUNKLINE_WORKER_API_KEY",
        secret=True,
    )
    connect_timeout_s: float = setting(2.0, "seconds to connect to a worker", minimum=0.001)
    first_byte_timeout_s: float = setting(
        600.0, "seconds until an answer must begin; then another worker is tried", minimum=0.001
    )
    idle_timeout_s: float = setting(
        300.0, "seconds between two parts of an answer; then it is broken off", minimum=0.001
    )
    health_path: str = setting("/health", "path of a worker that says whether it is well")
    health_interval_s: float = setting(
        5.0,
        "seconds between probes; a worker that has just sent something is not probed",
        minimum=0.001,
    )
    health_timeout_s: float = setting(2.0, "seconds that a probe may take", minimum=0.001)
    health_failures: int = setting(
        3,
        "failed probes in a row that make a worker down; a refused connection is enough after a "
        "failed request",
        minimum=1,
    )
    load_poll: bool = setting(True, "ask idle workers for GET /v1/loads, if they know it")
    breaker_failures: int = setting(
        5, "failures in a row after which a worker is left alone for a time", minimum=1
    )
    breaker_open_s: float = setting(
        1.0,
        "seconds it is left alone at first; doubled when the one request after it fails",
        minimum=0,
    )
    breaker_max_open_s: float = setting(30.0, "longest such time", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """The choice of a worker."""

    policy: str = setting("cache_aware", "how a worker is chosen", choices=POLICIES)
    seed: int = setting(0, "seed of random choices", minimum=0)
    decode_weight: float = setting(
        64.0, "prompt tokens that a request weighs besides its own, in a cost", minimum=0
    )
    kv_weight: float = setting(
        64.0, "prompt tokens that a half-full KV pool weighs, in a cost", minimum=0
    )
    placement_slack: float = setting(
        0.5,
        "a new prefix goes where its hash says if that costs at most so many times its tokens more",
        minimum=0,
    )
    load_bound: float = setting(
        1.25,
        "session and prefix_hash pass over workers above so many times the mean load",
        minimum=1,
    )
    head_blocks: int = setting(2, "blocks by which new prefixes are placed", minimum=1)
    block_bytes: int = setting(128, "bytes of a prompt's blocks", minimum=1)
    bytes_per_token: float = setting(4.0, "bytes of text per token, roughly", minimum=0.01)
    cache_tokens: int = setting(
        2_000_000, "tokens that a worker's cache holds, unless /v1/loads tells", minimum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Limits and retries."""

    max_in_flight: int = setting(0, "requests at all workers at once; 0: no limit", minimum=0)
    max_in_flight_per_worker: int = setting(0, "requests at one worker; 0: no limit", minimum=0)
    queue_size: int = setting(1024, "requests that may wait for a worker", minimum=0)
    queue_timeout_s: float = setting(30.0, "seconds that one may wait", minimum=0.001)
    max_attempts: int = setting(
        3, "workers that a request may reach before the first byte of an answer", minimum=1
    )
    retry_budget: float = setting(
        0.1, "part of the requests that may be tried again after a 429, 502, 503 or 504", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All settings of `engine-router`."""

    listen: ListenOptions = field(default_factory=ListenOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    queue: QueueOptions = field(default_factory=QueueOptions)

    def as_core(self, urls: list[str]) -> dict[str, object]:
        """The settings as `serve_router` takes them."""
        listen, workers, choice, queue = self.listen, self.workers, self.choice, self.queue
        one_to_one = {
            listen: (
                *("host", "port", "api_key", "admin_api_key", "max_body_bytes"),
                *("keep_alive_timeout_s", "shutdown_grace_s", "reuse_port"),
            ),
            workers: (
                *("worker_api_key", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s"),
                *("health_path", "health_interval_s", "health_timeout_s", "health_failures"),
                "load_poll",
            ),
            choice: ("block_bytes", "bytes_per_token", "cache_tokens"),
            queue: (
                *("max_in_flight", "queue_size", "queue_timeout_s", "max_attempts"),
                "retry_budget",
            ),
        }
        of_choice = (
            *("policy", "seed", "decode_weight", "kv_weight", "placement_slack", "load_bound"),
            "head_blocks",
        )
        return {
            "workers": urls,
            "threads": listen.threads or _threads(),
            "choice": {
                **{name: getattr(choice, name) for name in of_choice},
                "max_in_flight": queue.max_in_flight_per_worker,
                "breaker": {
                    "failures": workers.breaker_failures,
                    "open_s": workers.breaker_open_s,
                    "max_open_s": max(workers.breaker_open_s, workers.breaker_max_open_s),
                },
            },
            **{name: getattr(group, name) for group, names in one_to_one.items() for name in names},
        }
