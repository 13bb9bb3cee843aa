"""Sizes of an engine: its device, dtype and backend, KV pool and rows.

They are worked out before the weights are read, and on CUDA once more when the largest step was
tried. The arithmetic is that of `resources.py` and `trial.py`; what is asked of a device is here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from trunkline.engine import resources
from trunkline.engine.checkpoint import BlockCheckpoint, Checkpoint
from trunkline.engine.computation import computation
from trunkline.engine.config import CacheOptions, EngineConfig
from trunkline.engine.quantization import Stored, weight_bytes
from trunkline.engine.resources import SettingError
from trunkline.engine.runner import RunnerOptions, resolve_dtype
from trunkline.engine.shares import Share
from trunkline.engine.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What an engine is made with; if there is a `trial`, until its step was tried."""

    runner: RunnerOptions
    memory: resources.Memory
    pool_tokens: int
    trial: Trial | None = None  # by which the pool is sized once the weights are there

    def trial_options(self) -> RunnerOptions:
        """What the runner is made with at first: over the trial's pool, if there is one."""
        if self.trial is None:
            return self.runner
        return replace(self.runner, num_pages=self.trial.num_pages, is_trial=True)

    def with_memory(self, memory: resources.Memory, cache: CacheOptions) -> Sizes:
        """The same, with a pool for other memory, and without a trial.

        Raises:
            SettingError: it has no room for one.
        """
        most = self.runner.max_running_requests
        pool = resources.pool_tokens(cache, memory, self.runner.max_context_len, most)
        pages = pool // cache.page_size
        runner = replace(
            self.runner,
            num_pages=pages + 1,  # page 0 is padding
            max_running_requests=min(most, pages),
        )
        return Sizes(runner=runner, memory=memory, pool_tokens=pool)


def sizes_of(config: EngineConfig, checkpoint: Checkpoint, share: Share) -> Sizes:
    """Work out the sizes by estimates, before the weights are read.

    Raises:
        SettingError: a setting is out of range, or does not fit model and machine.
    """
    resources.check_queue_order(config.scheduler)
    model = checkpoint.config
    device = resolve_device(config.model.device, share)
    dtype = resolve_dtype(config.model.dtype, model.dtype, device)
    on_host = device.type == "cpu"
    free = free_bytes(device)
    if on_host and share.host_bytes is not None:
        free = min(free, share.host_bytes)
    kinds = checkpoint.matrix_kinds if isinstance(checkpoint, BlockCheckpoint) else frozenset()
    stored = Stored(kinds, weight_bytes(model, "none", dtype))
    chosen = computation(config.kernels, device, dtype, stored, _total_bytes(device))
    context_len = resources.context_length(config.model.context_length, model)
    max_running = resources.max_running_requests(config.scheduler, on_host=on_host)
    kv_bytes = dtype.itemsize if chosen.options.kv_dtype == "auto" else 1
    budget = config.scheduler.max_prefill_tokens or resources.MAX_BUDGET_TOKENS
    memory = resources.Memory(
        free=free,
        weights=weight_bytes(model, chosen.options.quantization, dtype),
        per_token=resources.kv_token_bytes(model, kv_bytes),
        on_host=on_host,
        num_engines=share.count if on_host else 1,
        per_step=0
        if on_host
        else resources.device_step_bytes(
            model, dtype.itemsize, budget, max_running, -(-context_len // config.cache.page_size)
        ),
    )
    pool = resources.pool_tokens(config.cache, memory, context_len, max_running)
    page = config.cache.page_size
    slots = min(max_running, pool // page)
    trial = None if on_host else Trial.of(budget, slots, page, pool, context_len)
    runner = RunnerOptions(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        backend=chosen.backend,
        computation=chosen.options,
        page_size=page,
        num_pages=pool // page + 1,  # page 0 is padding
        max_running_requests=slots,
        max_context_len=context_len,
    )
    return Sizes(runner=runner, memory=memory, pool_tokens=pool, trial=trial)


def resolve_device(requested: str, share: Share) -> torch.device:
    """The device to run on; of several engines each has a CUDA device of its own.

    Raises:
        SettingError: it is not there.
    """
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is cuda, but torch sees no CUDA device here; use cpu or auto")
    if requested == "cuda" and share.count > 1:
        if share.count > torch.cuda.device_count():
            raise SettingError(
                f"dp_size is {share.count}, but torch sees {torch.cuda.device_count()} CUDA "
                "devices, and each engine needs its own"
            )
        torch.cuda.set_device(share.rank)
        return torch.device("cuda", share.rank)
    return torch.device(requested)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device that holds weights and pool."""
    if device.type == "cpu":
        return resources.free_host_bytes()
    return torch.cuda.mem_get_info(device)[0]


def _total_bytes(device: torch.device) -> int:
    """Memory of the device; that of the host decides nothing."""
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def available(sizes: Sizes) -> str:
    free = free_bytes(torch.device(sizes.runner.device))
    return f"{free / resources.GIB:.2f} GB"
