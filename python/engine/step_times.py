"""What each step computed and how long it took, line by line in a file.

For those who fit a model of step time (`bench/fit_steps.py`); the scheduler knows nothing of it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from trunkline.engine.loop import Executor
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
    """A runner whose steps are written down, each at once."""

    def __init__(self, runner: Executor, path: Path) -> None:
        self._runner = runner
        self._path = path

    def execute(self, plan: Plan) -> npt.NDArray[np.uint8]:
        """Compute one step, and write what it was and took."""
        work = work_of(plan)
        started_at = time.perf_counter()
        result = self._runner.execute(plan)
        seconds = time.perf_counter() - started_at
        with self._path.open("a") as file:
            file.write(json.dumps({**work, "seconds": seconds}) + "\n")
        return result
