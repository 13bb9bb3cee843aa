"""Attention by FlashInfer 0.7: its paged decode and prefill wrappers over our pages.

FlashInfer is optional (`trunkline[cuda]`), compiles its kernels with nvcc at first use, and is
imported when an instance is made. Each kind of attention (window, soft cap, scale, heads) has a
wrapper of its own, which must be told the lengths of a step's rows before it runs ("planned"):

* in steps that are launched kernel by kernel, by the first layer of that kind;
* in captured steps, outside the graph: before each replay, by `prepare`.

Plans are made of lengths in host memory; only the list of pages is made on the device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import IntArray
from trunkline.kernels.specs import AttentionSpec
from trunkline.kernels.triton.batch import DeviceBatch, HostRows
from trunkline.kernels.triton.page_list import list_pages
from trunkline.kernels.triton.staging import Fence

WORKSPACE_BYTES = 256 << 20
# A wrapper's device memory for its plans: 8 MiB, two of which take a segment of torch's allocator.
PLAN_BYTES = 10 << 20
LEAST_CAPABILITY = 80
HEAD_DIMS = (64, 128, 256)
DEFAULT_CUDA_HOME = "/usr/local/cuda"
TENSOR_CORE_GROUP = 4  # query heads per key head from which decode runs as prefill does


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """What FlashInfer lacks to run here; None: nothing."""
    if device.type != "cuda":
        return f"it needs a CUDA device, but the device is {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major * 10 + minor < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0, but this device has {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes bfloat16 and float16, but dtype is {dtype}"
    if find_spec("flashinfer") is None:
        return "it is not installed; install trunkline[cuda]"
    if find_spec("flashinfer_jit_cache") is None and (tool := _missing_tool()) is not None:
        return f"it compiles its kernels, but there is no {tool}"
    return None


def _missing_tool() -> str | None:
    """What FlashInfer runs to compile a kernel, and does not find; None: nothing."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        if not Path(home, "bin/nvcc").exists():
            return f"nvcc in {home}/bin, where $CUDA_HOME points to"
    elif shutil.which("nvcc") is None and not Path(DEFAULT_CUDA_HOME, "bin/nvcc").exists():
        return f"nvcc on the PATH, in $CUDA_HOME/bin or in {DEFAULT_CUDA_HOME}/bin"
    for tool in ("ninja", os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            return f"{tool} on the PATH"
    return None


class Kind(NamedTuple):
    """What a plan is made for, besides lengths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    soft_cap: float | None
    scale: float

    @staticmethod
    def of(spec: AttentionSpec) -> Kind:
        """The kind of a layer's attention."""
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return Kind(*sizes, spec.window, spec.soft_cap, scale)


@dataclass(slots=True)
class PagedRows:
    """Rows as FlashInfer wants them: lengths on the host, pinned, and pages on the device."""

    page_starts: torch.Tensor  # [rows + 1] int32, CPU
    last_page_lens: torch.Tensor  # [rows] int32, CPU
    query_starts: torch.Tensor  # [rows + 1] int32, CPU
    pages: torch.Tensor  # [all pages] int32, device


@dataclass(slots=True)
class Planned:
    """A wrapper; once `copied`, the pinned memory that its plan lies in may be written again."""

    wrapper: Any
    copied: Fence = field(default_factory=Fence)


class FlashInferAttention:
    """See `kernels.triton.attention.Attention`. What it does not have, `fallback` computes."""

    name = "flashinfer"
    separates_decode = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, fallback: Any
    ) -> None:
        """Import FlashInfer.

        Args:
            device: a CUDA device.
            dtype: of queries and outputs.
            kv_dtype: of the pool.
            fallback: another `Attention`, for sinks and sizes of heads that FlashInfer lacks.
        """
        import flashinfer

        self._module: Any = flashinfer
        self._device = device
        self._dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype, "o_data_type": dtype}
        self._fallback = fallback
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._captured: dict[tuple[int, Kind], Planned] = {}
        self._eager: dict[tuple[str, Kind], Planned] = {}
        self._rows: HostRows | None = None
        self._planned: set[tuple[str, Kind]] = set()
        self._paged: dict[str, PagedRows] = {}

    def prepare(self, batch: DeviceBatch, rows: HostRows) -> None:
        self._fallback.prepare(batch, rows)
        self._rows = rows
        self._planned.clear()
        self._paged.clear()
        if not batch.is_captured:
            return
        for (bucket, kind), planned in self._captured.items():
            if bucket == batch.num_decode_rows:
                self._plan_decode(planned, kind, self._decode_pages(batch), batch)

    def attend(
        self, query: torch.Tensor, spec: AttentionSpec, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        if spec.sinks is not None or spec.head_dim not in HEAD_DIMS:
            self._fallback.attend(query, spec, batch, out)
            return
        kind = Kind.of(spec)
        layer = batch.layer(spec)
        pages = (layer.keys, layer.values)
        scales = {}
        if layer.keys.dtype != query.dtype:
            scales = {"k_scale": layer.key_scale, "v_scale": layer.value_scale}
        decode = batch.num_decode_rows
        if decode:
            wrapper = self._decoding(kind, batch).wrapper
            wrapper.run(query[:decode], pages, out=out[:decode], **scales)
        if query.shape[0] > decode:
            wrapper = self._prefilling(kind, batch).wrapper
            wrapper.run(query[decode:], pages, out=out[decode:], **scales)

    def captured_bytes(self, buckets: Sequence[int], pages_per_row: int) -> int:
        kinds = {kind for _, kind in self._eager}
        lists = sum(4 * (rows * (pages_per_row + 2) + 1) for rows in buckets)
        return len(kinds) * (len(buckets) * PLAN_BYTES + lists)

    def _decoding(self, kind: Kind, batch: DeviceBatch) -> Planned:
        if batch.is_captured:
            key = (batch.num_decode_rows, kind)
            if key not in self._captured:  # in the run before the capture
                planned = Planned(self._captured_wrapper(batch, kind))
                self._captured[key] = planned
                self._plan_decode(planned, kind, self._decode_pages(batch), batch)
            return self._captured[key]
        name = ("decode", kind)
        if name not in self._eager:
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=_uses_tensor_cores(kind)
            )
            self._eager[name] = Planned(wrapper)
        if name not in self._planned:
            self._plan_decode(self._eager[name], kind, self._decode_pages(batch), batch)
            self._planned.add(name)
        return self._eager[name]

    def _prefilling(self, kind: Kind, batch: DeviceBatch) -> Planned:
        name = ("prefill", kind)
        if name not in self._eager:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._eager[name] = Planned(wrapper)
        if name not in self._planned:
            self._plan_prefill(self._eager[name], kind, self._prompt_pages(batch), batch)
            self._planned.add(name)
        return self._eager[name]

    def _captured_wrapper(self, batch: DeviceBatch, kind: Kind) -> Any:
        rows = batch.num_decode_rows
        most = rows * batch.page_tables.shape[1]
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=_uses_tensor_cores(kind),
            paged_kv_indptr_buffer=_integers(rows + 1, self._device),
            paged_kv_indices_buffer=_integers(most, self._device),
            paged_kv_last_page_len_buffer=_integers(rows, self._device) + 1,
        )

    def _decode_pages(self, batch: DeviceBatch) -> PagedRows:
        if "decode" not in self._paged:
            assert self._rows is not None, "attention is prepared before it runs"
            lens = self._rows.kv_lens[: batch.num_decode_rows]
            # Padding rows read one key of page 0, which no sequence has.
            padding = np.ones(batch.num_decode_rows - lens.size, np.int32)
            slots = batch.row_slot[: batch.num_decode_rows]
            lens = np.concatenate([lens, padding])
            self._paged["decode"] = paged_rows(batch, slots, lens, np.ones_like(lens))
        return self._paged["decode"]

    def _prompt_pages(self, batch: DeviceBatch) -> PagedRows:
        if "prompt" not in self._paged:
            assert self._rows is not None, "attention is prepared before it runs"
            first = batch.num_decode_rows
            rows = self._rows
            self._paged["prompt"] = paged_rows(
                batch, batch.row_slot[first:], rows.kv_lens[first:], rows.query_lens[first:]
            )
        return self._paged["prompt"]

    def _plan_decode(
        self, planned: Planned, kind: Kind, rows: PagedRows, batch: DeviceBatch
    ) -> None:
        planned.copied.wait()
        planned.wrapper.plan(
            rows.page_starts,
            rows.pages,
            rows.last_page_lens,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            batch.pool.spec.page_size,
            **_options(kind),
            **self._dtypes,
        )
        planned.copied.set(self._device)

    def _plan_prefill(
        self, planned: Planned, kind: Kind, rows: PagedRows, batch: DeviceBatch
    ) -> None:
        planned.copied.wait()
        planned.wrapper.plan(
            rows.query_starts,
            rows.page_starts,
            rows.pages,
            rows.last_page_lens,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            batch.pool.spec.page_size,
            causal=True,
            **_options(kind),
            **self._dtypes,
        )
        planned.copied.set(self._device)


def _uses_tensor_cores(kind: Kind) -> bool:
    return kind.num_heads // kind.num_kv_heads >= TENSOR_CORE_GROUP


def _options(kind: Kind) -> dict[str, Any]:
    # Our windows count the query's own position, FlashInfer's what lies to its left.
    return {
        "window_left": -1 if kind.window is None else kind.window - 1,
        "logits_soft_cap": kind.soft_cap,
        "sm_scale": kind.scale,
    }


def paged_rows(
    batch: DeviceBatch, slots: torch.Tensor, kv_lens: IntArray, query_lens: IntArray
) -> PagedRows:
    """Lay out some rows of a step.

    Args:
        batch: the step.
        slots: [rows] int32, device.
        kv_lens: [rows], at least 1.
        query_lens: [rows].
    """
    page_size = batch.pool.spec.page_size
    counts = -(-kv_lens // page_size)
    page_starts = _starts(counts)
    pages = torch.empty(int(page_starts[-1]), dtype=torch.int32, device=slots.device)
    starts = _host(page_starts, slots.device)
    list_pages(batch.page_tables, slots, starts.to(slots.device, non_blocking=True), pages)
    return PagedRows(
        page_starts=starts,
        last_page_lens=_host(kv_lens - (counts - 1) * page_size, slots.device),
        query_starts=_host(_starts(query_lens), slots.device),
        pages=pages,
    )


def _host(array: IntArray, device: torch.device) -> torch.Tensor:
    """The array where copies to the device need not wait for what it is at work on."""
    tensor = torch.from_numpy(array.astype(np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _integers(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _starts(counts: IntArray) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
