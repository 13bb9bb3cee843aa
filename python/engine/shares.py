"""What each of several engines on one machine may take of it.

The supervisor works the shares out once, so that an engine that is started again beside the others
gets what it had, and not a part of what they have left.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec

from trunkline.engine.config import EngineConfig
from trunkline.engine.resources import free_host_bytes


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's part: of `count` engines it is number `rank`.

    `host_bytes` is the memory that it may count on, `threads` how many threads compute; None: what
    the machine has.
    """

    rank: int = 0
    count: int = 1
    host_bytes: int | None = None
    threads: int | None = None


def equal_shares(count: int) -> list[Share]:
    """Equal parts of the free memory and of the allowed cores for `count` engines."""
    if count == 1:
        return [Share()]
    host_bytes = free_host_bytes() // count
    threads = max(1, allowed_cores() // count)
    return [
        Share(rank=rank, count=count, host_bytes=host_bytes, threads=threads)
        for rank in range(count)
    ]


def replica_config(config: EngineConfig) -> EngineConfig:
    """The settings of one engine of `dp_size`: what is given for all of them is divided."""
    most, count = config.scheduler.max_running_requests, config.parallel.dp_size
    if most is None or count == 1:
        return config
    scheduler = dataclasses.replace(config.scheduler, max_running_requests=-(-most // count))
    return dataclasses.replace(config, scheduler=scheduler)


def allowed_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: by its affinity, and by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    if quota_file.exists():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores
