"""An engine process without a model, for `http_cost.py`: the real loop and scheduler, paced steps.

A step ends at the next point of a fixed grid of the monotonic clock, `RATE` (environment,
`PACED_RATE`) to the second, and gives every running sequence the letter of that point: the point's
number modulo 26. Whoever reads a letter knows when it was made.
"""

from __future__ import annotations

import os
import string
import time
from collections.abc import Callable

import numpy as np

from trunkline._core import Core
from trunkline.engine.channel import Port
from trunkline.engine.config import EngineConfig, flat_settings
from trunkline.engine.core_config import CoreConfig
from trunkline.engine.loop import EngineLoop, Entered, LoopOptions
from trunkline.engine.messages import EngineFacts
from trunkline.engine.process import run_child
from trunkline.engine.shares import Share
from trunkline.engine.weights import open_checkpoint
from trunkline.kernels.interface import Finished
from trunkline.plan import Plan, encode_result

RATE = float(os.environ.get("PACED_RATE", "200"))
PAGES, PAGE_SIZE, CONTEXT, ROWS, BUDGET = 1 << 16, 16, 8192, 512, 8192


class PacedRunner:
    """Waits for the grid's next point, and answers with its letter."""

    def __init__(self, letters: list[int]) -> None:
        """`letters` are the token ids of a to z."""
        self._letters = letters

    def forward(self, plan: Plan) -> None:
        """See `loop.Executor`."""

    def awaits_earlier(self, plan: Plan) -> bool:
        """See `loop.Executor`."""
        return False

    def sample(self, plan: Plan) -> Finished:
        """One step."""
        point = int(time.monotonic() * RATE) + 1
        time.sleep(max(0.0, point / RATE - time.monotonic()))
        rows = plan.sample_slot.size
        letter = self._letters[point % len(self._letters)]
        sections = {
            "sample_counts": np.ones(rows, dtype=np.int32),
            "token_ids": np.full(rows, letter, dtype=np.int32),
        }
        return Finished(encode_result(plan.step, sections))


class PacedEngine:
    """What `run_child` runs."""

    def __init__(self, config: EngineConfig, share: Share) -> None:
        """Take tokenizer and sizes from the checkpoint; its weights stay where they are."""
        checkpoint = open_checkpoint(config.model)
        ids = checkpoint.tokenizer.encode_batch(list(string.ascii_lowercase), False)
        self._runner = PacedRunner([letter for [letter] in ids])
        vocab = checkpoint.config.vocab_size
        self._config = CoreConfig(
            page_size=PAGE_SIZE,
            num_pages=PAGES,
            max_running_requests=ROWS,
            max_batch_tokens=BUDGET,
            max_context_len=CONTEXT,
            vocab_size=vocab,
            arena_bytes=16 << 20,
            tokenizer_json=checkpoint.tokenizer.to_json(),
        )
        self._core = Core(self._config.to_json())
        self.facts = EngineFacts(
            pid=os.getpid(),
            model_path=checkpoint.source,
            dtype="none",
            device="cpu",
            weight_version="none",
            vocab_size=vocab,
            page_size=PAGE_SIZE,
            context_length=CONTEXT,
            max_total_tokens=(PAGES - 1) * PAGE_SIZE,
            max_running_requests=ROWS,
            max_batch_tokens=BUDGET,
            chunked_prefill_size=None,
            weight_bytes=0,
            kv_cache_bytes=0,
            eos_token_ids=[],
            settings=flat_settings(config),
            startup_s=0.0,
        )

    def loop(
        self, port: Port, beat: Callable[[], None], entered: Entered | None = None
    ) -> EngineLoop:
        """Join it to a port."""
        options = LoopOptions(
            arena_bytes=self._config.arena_bytes,
            max_total_tokens=self.facts.max_total_tokens,
            beat=beat,
            entered=entered,
        )
        return EngineLoop(self._core, self._runner, port, options)


if __name__ == "__main__":
    run_child(PacedEngine)
