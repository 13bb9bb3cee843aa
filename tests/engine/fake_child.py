"""An engine process with a fake scheduler, for `test_process.py`: run with `python -m`.

`model_path` says what goes wrong: "bad" and "broken" fail to start, "stuck" hangs in its first
step, "slow" takes 10 ms a step, "deadly" too and dies of token 666.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import msgspec
from tests.engine.fakes import FACTS, FakeCore, FakeRunner

from trunkline.engine.channel import Port
from trunkline.engine.config import EngineConfig
from trunkline.engine.loop import EngineLoop, Entered, LoopOptions
from trunkline.engine.process import run_child
from trunkline.engine.shares import Share
from trunkline.plan import Plan

DEADLY = 666


class FakeLaunched:
    facts = msgspec.structs.replace(FACTS, pid=os.getpid())

    def __init__(self, config: EngineConfig, share: Share) -> None:
        self.model = config.model.model_path
        if self.model == "bad":
            raise ValueError("tensor lm_head is missing")
        if self.model == "broken":
            raise KeyError("lm_head")

    def loop(
        self, port: Port, beat: Callable[[], None], entered: Entered | None = None
    ) -> EngineLoop:
        options = LoopOptions(
            arena_bytes=1 << 16, max_total_tokens=1024, beat=beat, entered=entered
        )
        return EngineLoop(FakeCore(), FakeRunner(self.hook), port, options)

    def hook(self, plan: Plan) -> None:
        if self.model == "stuck":
            time.sleep(60)
        if self.model in ("slow", "deadly"):
            time.sleep(0.01)
        if self.model == "deadly" and DEADLY in plan.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run_child(FakeLaunched)
