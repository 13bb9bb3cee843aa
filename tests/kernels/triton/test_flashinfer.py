"""What FlashInfer is told, without FlashInfer: a stand-in attends with it, as its wrappers would.

`tests/kernels/test_flashinfer_signatures.py` compares the calls with the real package's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.tiny import memory_checkpoint, scaled_checkpoint, tiny_runner

from trunkline.kernels import BackendOptions, flashinfer
from trunkline.kernels.triton.graphs import batch_buckets
from trunkline.kernels.triton.page_list import list_pages


class Wrapper:
    """Attends over pages as the last plan says."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "NHD"
        self.options = options
        self.num_plans = 0

    def take(
        self, layout: tuple[torch.Tensor, ...], sizes: tuple[int, ...], **options: Any
    ) -> None:
        self.query_starts, self.page_starts, self.pages, self.last_page_lens = layout
        assert all(one.device.type == "cpu" and one.dtype == torch.int32 for one in layout)
        self.page_size = sizes[3]
        self.window = options["window_left"]
        self.scale = options["sm_scale"]
        self.num_plans += 1

    def run(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        for row, last in enumerate(self.last_page_lens.tolist()):
            start, end = self.query_starts[row : row + 2].tolist()
            chosen = self.pages[self.page_starts[row] : self.page_starts[row + 1]].long()
            keys, values = (
                # Indices are not implemented for fp8.
                pool.view(torch.uint8)[chosen].view(pool.dtype).flatten(0, 1).float() * scale
                for pool, scale in zip(pages, (k_scale, v_scale), strict=True)
            )
            length = (chosen.numel() - 1) * self.page_size + last
            group = query.shape[1] // keys.shape[1]
            keys, values = (x[:length].repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * self.scale
            distance = (
                torch.arange(length)[None] - torch.arange(length - end + start, length)[:, None]
            )
            hidden = distance > 0
            if self.window >= 0:
                hidden |= -distance > self.window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


class Decode(Wrapper):
    def plan(self, starts: Any, pages: Any, last: Any, *sizes: int, **options: Any) -> None:
        queries = torch.arange(last.numel() + 1, dtype=torch.int32)
        if self.options.get("use_cuda_graph"):
            assert last.numel() == self.options["paged_kv_last_page_len_buffer"].numel()
            assert pages.numel() <= self.options["paged_kv_indices_buffer"].numel()
        self.take((queries, starts, pages, last), sizes, **options)


class Prefill(Wrapper):
    def plan(
        self, queries: Any, starts: Any, pages: Any, last: Any, *sizes: int, **options: Any
    ) -> None:
        assert options["causal"]
        self.take((queries, starts, pages, last), sizes, **options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "why_not", lambda *_: None)
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", (8, 16))
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)


@pytest.mark.parametrize(
    ("found", "home", "reason"),
    [
        ({"nvcc", "ninja", "c++"}, None, None),
        ({"ninja", "c++"}, "with nvcc", None),
        ({"nvcc", "c++"}, None, "it compiles its kernels, but there is no ninja on the PATH"),
        ({"nvcc", "ninja"}, None, "it compiles its kernels, but there is no c++ on the PATH"),
        (
            {"ninja", "c++"},
            None,
            "it compiles its kernels, but there is no nvcc on the PATH, in $CUDA_HOME/bin or in "
            "/nowhere/bin",
        ),
        (
            {"nvcc", "ninja", "c++"},
            "without",
            "it compiles its kernels, but there is no nvcc in {home}/bin, where $CUDA_HOME points "
            "to",
        ),
    ],
)
def test_flashinfer_needs_what_compiles_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: set[str],
    home: str | None,
    reason: str | None,
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if home == "with nvcc":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/nvcc").touch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flashinfer, "DEFAULT_CUDA_HOME", "/nowhere")
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: name == "flashinfer" or None)
    monkeypatch.setattr(flashinfer.shutil, "which", lambda tool: tool if tool in found else None)
    expected = None if reason is None else reason.format(home=tmp_path)
    assert flashinfer.why_not(torch.device("cuda"), torch.bfloat16) == expected


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("family", ["qwen2-mixed-window"])
@pytest.mark.parametrize("largest", [0, 4])
def test_a_model_that_attends_with_flashinfer(family: str, largest: int) -> None:
    """Mixed steps, chunks, two windows, and decode steps in padded buckets."""
    generator = np.random.default_rng(2)
    prompts = [generator.integers(0, 199, length).tolist() for length in (60, 3, 17)]
    options = BackendOptions(attention="flashinfer", max_graph_batch=largest)
    made = memory_checkpoint(family)
    runner = tiny_runner(made, backend="triton", computation=options)
    assert runner.backend.attention.name == "flashinfer"  # type: ignore[union-attr]
    got, expected = ([Sequence(prompt) for prompt in prompts] for _ in range(2))
    Driver(runner, 0).generate(got, 3, chunk=33)
    Driver(tiny_runner(made, backend="torch"), 0).generate(expected, 3, chunk=33)
    for one, other in zip(got, expected, strict=True):
        assert one.output == other.output
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.usefixtures("stand_in")
def test_what_captured_steps_keep_is_known_before() -> None:
    made = memory_checkpoint("qwen2-mixed-window")
    before, captured = (
        tiny_runner(
            made,
            backend="triton",
            computation=BackendOptions(attention="flashinfer", max_graph_batch=largest),
        )
        for largest in (0, 4)
    )
    assert before.captured_bytes(4) == 0, "it has seen no attention"
    Driver(before, 0).generate([Sequence(list(range(3, 20)))], 1, chunk=32)
    for count in batch_buckets(4):
        rows = [Sequence([3 + row]) for row in range(count)]
        Driver(captured, 0).generate(rows, 2, chunk=8)
    wrappers = [one.wrapper for one in captured.backend.attention._captured.values()]  # type: ignore[union-attr]
    assert len(wrappers) == 2 * len(batch_buckets(4)), "there are two windows"
    buffers = [
        one.options[f"paged_kv_{name}_buffer"].nbytes
        for one in wrappers
        for name in ("indptr", "indices", "last_page_len")
    ]
    kept = sum(buffers) + len(wrappers) * flashinfer.PLAN_BYTES
    assert before.captured_bytes(4) == captured.captured_bytes(4) + kept == kept


@pytest.mark.usefixtures("stand_in")
def test_scales_of_keys_and_values_in_fp8() -> None:
    outputs = []
    for made in (memory_checkpoint("llama"), scaled_checkpoint("llama", 2**10, 2**12)):
        options = BackendOptions(attention="flashinfer", kv_dtype="fp8_e4m3", max_graph_batch=2)
        runner = tiny_runner(made, backend="triton", computation=options)
        rows = [Sequence(list(range(3, 20)))]
        Driver(runner, 0).generate(rows, 3, chunk=9)
        outputs.append((rows[0].output, rows[0].logprobs))
    assert outputs[0] == outputs[1]


def test_pages_are_listed_row_by_row() -> None:
    tables = torch.arange(4 * 700, dtype=torch.int32).view(4, 700)
    slots = torch.tensor([2, 0, 3], dtype=torch.int32)
    starts = torch.tensor([0, 600, 601, 604], dtype=torch.int32)
    pages = torch.full((604,), -1, dtype=torch.int32)
    list_pages(tables, slots, starts, pages)
    expected = torch.cat([tables[2, :600], tables[0, :1], tables[3, :3]])
    assert torch.equal(pages, expected)
