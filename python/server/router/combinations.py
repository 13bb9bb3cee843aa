"""What settings of `engine-router` mean for each other: pure functions.

Which policy reads what is `rust/router/src/core/policy.rs`'s to decide.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from trunkline.server.router.config import POLICIES, RouterConfig

# Setting of the choice -> the policies that read it.
_BY_LOAD: Final = ("cache_aware", "power_of_two", "least_load", "session", "prefix_hash")
_BY_PREFIX: Final = ("cache_aware", "prefix_hash")
_READ_BY: Final = {
    "seed": tuple(policy for policy in POLICIES if policy != "round_robin"),
    "decode_weight": _BY_LOAD,
    "kv_weight": _BY_LOAD,
    "placement_slack": ("cache_aware",),
    "load_bound": ("session", "prefix_hash"),
    "head_blocks": _BY_PREFIX,
    "block_bytes": _BY_PREFIX,
    "bytes_per_token": _BY_LOAD,
    "cache_tokens": ("cache_aware",),
}


def refuse_contradictions(config: RouterConfig, given: Collection[str]) -> None:
    """Refuse what cannot be meant together, of settings that were given.

    Raises:
        ValueError: there is such a thing; the message names the flags and the remedy.
    """
    workers = config.workers
    if "breaker_max_open_s" in given and workers.breaker_max_open_s < workers.breaker_open_s:
        raise ValueError(
            f"--breaker-max-open-s is {workers.breaker_max_open_s:g}, but a worker is left alone "
            f"for --breaker-open-s {workers.breaker_open_s:g} at first; it must be at least that"
        )


def without_effect(config: RouterConfig, given: Collection[str]) -> list[str]:
    """A sentence for each given setting that changes nothing."""
    policy, queue = config.choice.policy, config.queue
    found = [
        f"{name} has no effect: the policy {policy!r} does not read it"
        for name, policies in _READ_BY.items()
        if name in given and policy not in policies
    ]
    most, most_at_one = queue.max_in_flight, queue.max_in_flight_per_worker
    if 0 < most <= most_at_one:
        found.append(
            f"max_in_flight_per_worker has no effect: there are never more than max_in_flight, "
            f"{most}, at all workers together"
        )
    return found
