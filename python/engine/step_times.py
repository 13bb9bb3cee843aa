"""What each step computed and how long it took, line by line in a file.

For those who fit a model of step time (`bench/fit_steps.py`); the scheduler knows nothing of it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from trunkline.engine.loop import Executor
    from trunkline.kernels.interface import PendingResult
    from trunkline.plan import Plan

WORK_NAMES: Final = ("prompt_tokens", "decode_rows", "decode_context", "prompt_pairs")


def work_of(plan: Plan) -> dict[str, float]:
    """What a step computes, as `rust/router/src/sim/step_time.rs` counts it.

    `prompt_tokens` are those of rows that compute several, `decode_rows` the other rows;
    `decode_context` is what the latter attend to, `prompt_pairs` how many pairs of a prompt token
    and a token that it attends to there are.
    """
    query = plan.row_query_len.astype(np.float64)
    computed = plan.row_computed_len.astype(np.float64)
    decoding = query == 1
    prompt_query, prompt_computed = query[~decoding], computed[~decoding]
    return {
        "prompt_tokens": float(prompt_query.sum()),
        "decode_rows": float(decoding.sum()),
        "decode_context": float((computed[decoding] + 1).sum()),
        "prompt_pairs": float((prompt_query * (prompt_computed + (prompt_query + 1) / 2)).sum()),
    }


class TimedExecutor:
    """A runner whose steps are written down, each when it is done.

    A step takes from when it is launched, or from when the one before it is done if that is later,
    until it is done.
    """

    def __init__(self, runner: Executor, path: Path) -> None:
        self._runner = runner
        self._path = path
        self._launched_at = 0.0
        self._done_at = 0.0

    def forward(self, plan: Plan) -> None:
        """See `loop.Executor`."""
        self._launched_at = time.perf_counter()
        self._runner.forward(plan)

    def awaits_earlier(self, plan: Plan) -> bool:
        """See `loop.Executor`."""
        return self._runner.awaits_earlier(plan)

    def sample(self, plan: Plan) -> PendingResult:
        """See `loop.Executor`."""
        return _TimedResult(self, work_of(plan), self._launched_at, self._runner.sample(plan))

    def note(self, work: dict[str, float], launched_at: float) -> None:
        """Write down a step that is done now."""
        done_at = time.perf_counter()
        seconds = done_at - max(launched_at, self._done_at)
        self._done_at = done_at
        with self._path.open("a") as file:
            file.write(json.dumps({**work, "seconds": seconds}) + "\n")


@dataclass(frozen=True, slots=True)
class _TimedResult:
    executor: TimedExecutor
    work: dict[str, float]
    launched_at: float
    pending: PendingResult

    def wait(self) -> npt.NDArray[np.uint8]:
        result = self.pending.wait()
        self.executor.note(self.work, self.launched_at)
        return result
