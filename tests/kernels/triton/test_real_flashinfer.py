"""FlashInfer's own wrappers take our plans and runs, up to its kernels; where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.tiny import memory_checkpoint, tiny_runner

from trunkline.kernels import BackendOptions
from trunkline.kernels import flashinfer as ours

pytest.importorskip("flashinfer")

import flashinfer.decode
import flashinfer.prefill
import flashinfer.utils


class Kernels:
    """A module of compiled kernels that does nothing but count."""

    def __init__(self, calls: dict[str, int]) -> None:
        self._calls = calls

    def plan(self, *_: Any) -> list[int]:
        self._calls["plan"] = self._calls.get("plan", 0) + 1
        return [0] * 20

    def run(self, *_: Any) -> None:
        self._calls["run"] = self._calls.get("run", 0) + 1

    paged_run = run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of capability 9.0 as far as FlashInfer's wrappers look."""
    made: dict[str, int] = {}
    empty = torch.empty
    unpinned = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)  # noqa: E731
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # which no kernel writes
    for module in (flashinfer.decode, flashinfer.prefill, flashinfer.utils):
        for name, value in (
            ("get_batch_decode_module", lambda *_: Kernels(made)),
            ("get_batch_prefill_module", lambda *_: Kernels(made)),
            ("get_compute_capability", lambda _: (9, 0)),
            ("device_support_pdl", lambda _: False),
        ):
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(ours, "why_not", lambda *_: None)
    monkeypatch.setattr(ours, "HEAD_DIMS", (8, 16))
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1 << 16)
    return made


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(("group", "largest"), [(3, 4), (4, 4), (3, 0)])
def test_wrappers_take_our_calls(
    calls: dict[str, int], monkeypatch: pytest.MonkeyPatch, kv_dtype: str, group: int, largest: int
) -> None:
    """Prompts and decode steps of a model with windows and caps; two kernels decode."""
    monkeypatch.setattr(ours, "TENSOR_CORE_GROUP", group)
    options = BackendOptions(attention="flashinfer", kv_dtype=kv_dtype, max_graph_batch=largest)
    runner = tiny_runner(
        memory_checkpoint("gemma2"), dtype="bfloat16", backend="triton", computation=options
    )
    rows = [Sequence(list(range(3, 3 + length))) for length in (9, 3)]
    Driver(runner, 0).generate(rows, 2, chunk=6)
    assert calls["plan"] > 0
    assert calls["run"] > calls["plan"]
    planned = runner.backend.attention._captured.values()  # type: ignore[union-attr]
    kept = {one.wrapper._int_workspace_buffer.nbytes for one in planned}
    assert all(2 * one <= 2 * ours.PLAN_BYTES <= 20 << 20 for one in kept)
