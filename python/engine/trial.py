"""How much memory a CUDA device needs beside the KV pool: measured by the largest step, run once.

The model is loaded over a small pool, the step is run, and what torch's allocator took at its peak
is read; then the pool gets what is left (`resources.pool_tokens`), and graphs are captured. What
one run cannot show (more rows than it has, prompts' log-probs, graphs) is added by arithmetic.
This module knows no scheduler: who calls it runs the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from trunkline.engine import resources
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.resources import GIB, Memory, SettingError

# More rows are added by arithmetic: their pages would need a pool that may not fit.
MAX_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class Trial:
    """The step that is run: `num_rows` prompts of `width` tokens, each of which draws a token."""

    num_rows: int
    width: int
    num_pages: int  # of its pool, page 0 included

    @staticmethod
    def of(budget: int, max_rows: int, page_size: int, pool_tokens: int, context_len: int) -> Trial:
        """The step nearest to the largest one.

        Args:
            budget: most tokens of a step.
            max_rows: most rows of a step.
            page_size: positions of a page.
            pool_tokens: what the pool is estimated to hold, which a trial must not exceed.
            context_len: most tokens of a row, its output included.
        """
        # A row has two positions at least, and an eighth of a step's tokens is for prompts.
        fitting = pool_tokens // max(page_size, 2)
        num_rows = max(1, min(max_rows, MAX_ROWS, budget - budget // 8, fitting))
        most = min(context_len - 1, pool_tokens // num_rows // page_size * page_size - 1)
        width = max(1, min(budget // num_rows, most))
        pages = -(-(width + 1) // page_size)
        return Trial(num_rows, width, num_rows * pages + 1)


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes that were found to be taken."""

    weights: int  # with all that lies beside them between steps, but for the pool
    step: int  # by the step, at its peak
    other: int  # outside of torch's allocator: context, kernels, libraries


def measure(device: torch.device, free: int, pool_bytes: int, run: Callable[[], object]) -> Taken:
    """Run a step and see what it takes.

    Args:
        device: a CUDA device, on which the model is loaded.
        free: bytes that were free before.
        pool_bytes: of the trial's pool.
        run: the step; returns when the device is done.

    Raises:
        SettingError: the step does not fit.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        run()
    except torch.cuda.OutOfMemoryError as error:
        raise SettingError(
            f"the largest step does not fit beside the model: of {free / GIB:.1f} GiB that were "
            f"free, {before / GIB:.1f} GiB are taken by weights and a trial's KV pool; lower "
            f"max_prefill_tokens or max_running_requests ({error})"
        ) from error
    # Reserved, not allocated: what the allocator cannot hand out for its pieces is taken, too.
    peak = torch.cuda.max_memory_reserved(device)
    left = torch.cuda.mem_get_info(device)[0]
    other = free - left - torch.cuda.memory_reserved(device)
    return Taken(weights=before - pool_bytes, step=peak - before, other=max(other, 0))


def measured_memory(
    taken: Taken,
    trial: Trial,
    estimate: Memory,
    config: DecoderConfig,
    max_rows: int,
    graph_bytes: int,
) -> Memory:
    """The device's memory as `resources.pool_tokens` wants it, by measurement.

    Args:
        taken: by the trial.
        trial: what was run.
        estimate: what was thought before.
        config: the model.
        max_rows: most rows of a step.
        graph_bytes: what captured steps will take.
    """
    rows_beyond = max(0, max_rows - trial.num_rows)
    added = rows_beyond * resources.row_bytes(config) + resources.score_bytes(config)
    return Memory(
        free=estimate.free,
        weights=taken.weights,
        per_token=estimate.per_token,
        on_host=False,
        per_step=taken.step + taken.other + added + graph_bytes,
    )
