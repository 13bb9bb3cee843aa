"""A runner whose samples obey grammars.

It stands between loop and runner. Masks that depend on no step in flight are filled while the
forward pass is launched, the others once the loop has waited for those steps.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from trunkline.engine.grammar.backend import Masks
from trunkline.engine.grammar.masks import MaskSource, Sample

if TYPE_CHECKING:
    from trunkline.kernels.interface import PendingResult
    from trunkline.plan import Plan


class Runner(Protocol):
    """What is needed of a runner."""

    def forward(self, plan: Plan) -> None: ...
    def sample(self, plan: Plan, masks: Masks | None = None) -> PendingResult: ...
    def awaits_earlier(self, plan: Plan) -> bool: ...


class ConstrainedRunner:
    """See `loop.Executor`."""

    def __init__(self, runner: Runner, masks: MaskSource) -> None:
        self._runner = runner
        self._masks = masks
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        # Of the step between `forward` and `sample`.
        self._samples: list[Sample] = []
        self._filling: Future[Masks] | None = None

    def forward(self, plan: Plan) -> None:
        masks = self._masks
        masks.update(plan)
        self._samples = masks.samples(plan)
        self._filling = None
        if self._samples and masks.knows(plan, self._samples):
            self._filling = self._thread.submit(masks.fill, plan, self._samples)
        try:
            self._runner.forward(plan)
        except BaseException:
            if self._filling is not None:
                wait_for([self._filling])
            raise

    def awaits_earlier(self, plan: Plan) -> bool:
        return bool(self._samples) and self._filling is None

    def sample(self, plan: Plan) -> PendingResult:
        samples, filling = self._samples, self._filling
        if not samples:
            return self._runner.sample(plan)
        masks = self._masks.fill(plan, samples) if filling is None else filling.result()
        return _ConstrainedResult(
            self._masks, plan, samples, masks, self._runner.sample(plan, masks)
        )


@dataclass(frozen=True, slots=True)
class _ConstrainedResult:
    """See `PendingResult`; with what the tokens mean for their grammars."""

    source: MaskSource
    plan: Plan
    samples: list[Sample]
    masks: Masks
    pending: PendingResult

    def wait(self) -> npt.NDArray[np.uint8]:
        result = self.pending.wait()
        self.source.recycle(self.masks)
        return self.source.accept(self.plan, self.samples, result)
