"""Whole steps on the device: stage the plan, apply it, forward, sample, read back.

Nothing here waits for the device, except where a block of host memory comes round again before its
copy is through.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import ForwardOutputs, IntArray, ProgramSizes
from trunkline.kernels.plan_checks import check_plan, within
from trunkline.kernels.triton.batch import DeviceBatch, HostRows
from trunkline.kernels.triton.decode_steps import BucketWork, Computed, DecodeSteps
from trunkline.kernels.triton.graphs import batch_buckets
from trunkline.kernels.triton.page_copy import copy_pages
from trunkline.kernels.triton.pool import DeviceKvPool
from trunkline.kernels.triton.result import DeviceResult
from trunkline.kernels.triton.sampling import Sampler
from trunkline.kernels.triton.slots import DeviceSlots, HostSlots, SampleNeeds
from trunkline.kernels.triton.staging import Readback, StagingArena
from trunkline.kernels.triton.step_arrays import (
    decode_arrays,
    move_array,
    padding_arrays,
    prompt_arrays,
)
from trunkline.plan import Plan

if TYPE_CHECKING:
    from trunkline.kernels.triton.backend import TritonBackend

Array = npt.NDArray[Any]
Staged = dict[str, torch.Tensor]

STAGING_BYTES = 4 << 20


@dataclass(slots=True)
class _Launched:
    """Between `forward` and `sample` of one plan."""

    plan: Plan
    known: npt.NDArray[np.bool_]
    needs: SampleNeeds
    staged: Staged
    computed: Computed
    replayed_draw: int | None  # the bucket whose draw is all that the samples need


class DeviceProgram:
    """See `kernels.interface.StepProgram`."""

    def __init__(
        self,
        forward: Callable[[DeviceBatch], ForwardOutputs],
        backend: TritonBackend,
        sizes: ProgramSizes,
    ) -> None:
        """Allocate everything and capture the decode steps.

        Raises:
            ValueError: the backend cannot compute what the model does.
        """
        self._model = forward
        self._backend = backend
        self._sizes = sizes
        device = self._device = backend.device
        self._launched: _Launched | None = None
        self._host = HostSlots(sizes.num_slots, backend.vocab_size)
        with torch.inference_mode(), self._on_device():
            self._pool = DeviceKvPool(sizes.kv, backend.kv_dtype, device)
            self._slots = DeviceSlots(sizes, backend.vocab_size, device)
            self._sampler = Sampler(self._slots, device)
            self._arena = StagingArena(device, STAGING_BYTES)
            wanted = 0 if sizes.is_trial else backend.options.max_graph_batch
            largest = min(wanted, sizes.num_slots)
            # One buffer for all buckets: they are replayed in turns.
            shape = (largest, backend.vocab_size)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=device)
            self._decode = DecodeSteps(largest, self._bucket_work, device)

    def _on_device(self) -> AbstractContextManager[Any]:
        # Each thread has a current device of its own.
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    @property
    def overlap_depth(self) -> int:
        """The host plans a step while the device computes the one before."""
        return 1 if self._device.type == "cuda" else 0

    @property
    def page_bytes(self) -> int:
        return self._pool.page_bytes

    @property
    def pool_bytes(self) -> int:
        return self._pool.num_bytes

    def population(self) -> None:
        return None

    def captured_bytes(self, num_rows: int) -> int:
        pages = self._slots.page_tables.shape[1]
        return self._backend.attention.captured_bytes(batch_buckets(num_rows), pages)

    def forward(self, plan: Plan) -> None:
        check_plan(plan, self._sizes)
        self._host.check(plan)
        with torch.inference_mode(), self._on_device():
            self._launched = self._launch(plan)

    def _launch(self, plan: Plan) -> _Launched:
        lanes = self._host.update(plan)
        needs = self._host.needs(plan)
        self._slots.reserve_lanes(self._host.num_lanes)
        known = within(plan.token_ids, 0, self._backend.vocab_size)
        rows = HostRows(plan.row_query_len, plan.row_computed_len + plan.row_query_len)
        rest = self._sampler.arrays(plan, needs)
        rest |= self._slots.update_arrays(plan, lanes) | move_array(plan)
        bucket = self._decode.bucket(plan)
        arrays: dict[str, Array] = {}
        if bucket is not None:
            arrays = decode_arrays(plan, known, bucket, self._slots.padding_slot) | rest
            if not self._arena.fits(arrays):
                bucket = None  # a graph reads nothing but the arena's own block
        num_decode = rows.num_decode_rows if self._backend.attention.separates_decode else 0
        if bucket is None:
            arrays = prompt_arrays(plan, known, rows, num_decode) | rest
        staged = self._arena.stage(arrays)
        self._slots.apply(staged)
        if "moves" in staged:
            copy_pages(self._pool.data, staged["moves"])
        if bucket is None:
            batch = self._any_batch(staged, rows, num_decode)
            self._backend.attention.prepare(batch, rows)
            computed = self._compute(batch, staged)
        else:
            self._backend.attention.prepare(self._decode_batch(staged), rows)
            computed = self._decode.forward(bucket)
        replayed_draw = bucket if needs.is_plain and _is_one_by_one(plan) else None
        return _Launched(plan, known, needs, staged, computed, replayed_draw)

    def _any_batch(self, staged: Staged, rows: HostRows, num_decode: int) -> DeviceBatch:
        return DeviceBatch(
            pool=self._pool,
            page_tables=self._slots.page_tables,
            token_ids=staged["token_ids"],
            positions=staged["positions"],
            token_slot=staged["token_slot"],
            row_slot=staged["row_slot"],
            kv_lens=staged["kv_lens"],
            query_start=staged["query_start"],
            num_decode_rows=num_decode,
            max_query_len=int(rows.query_lens.max()),
            max_kv_len=int(rows.kv_lens.max()),
            logit_tokens=staged["logit_tokens"],
            pooled_tokens=staged["pooled_tokens"],
        )

    def _decode_batch(self, staged: Staged) -> DeviceBatch:
        bucket = staged["row_slot"].shape[0]
        apart = self._backend.attention.separates_decode
        return DeviceBatch(
            pool=self._pool,
            page_tables=self._slots.page_tables,
            token_ids=staged["token_ids"],
            positions=staged["positions"],
            token_slot=staged["token_slot"],
            row_slot=staged["row_slot"],
            kv_lens=staged["kv_lens"],
            query_start=staged["query_start"],
            num_decode_rows=bucket if apart else 0,
            max_query_len=1,
            max_kv_len=None,
            logit_tokens=None,
            pooled_tokens=staged["row_slot"][:0],
            is_captured=True,
            logits_out=self._logits[:bucket],
        )

    def _bucket_work(self, bucket: int) -> BucketWork:
        staged = self._arena.stage(padding_arrays(bucket, self._slots.padding_slot))
        batch = self._decode_batch(staged)
        nothing = np.zeros(0, np.int32)
        self._backend.attention.prepare(batch, HostRows(nothing, nothing))
        return BucketWork(
            forward=lambda: self._compute(batch, staged),
            draw=lambda: self._sampler.draw_plainly(self._logits[:bucket], staged),
        )

    def _compute(self, batch: DeviceBatch, staged: Staged) -> Computed:
        """The model's forward pass; tokens that the host does not know are the last sampled."""
        source = staged["token_source"]
        sampled = self._slots.last_tokens.index_select(0, source.clamp(min=0))
        torch.where(source >= 0, sampled, batch.token_ids, out=batch.token_ids)
        outputs = self._model(batch)
        finite = torch.isfinite(outputs.hidden.settled()).all(dim=1)
        return Computed(outputs.logits, finite, outputs.pooled_states)

    def sample(self, plan: Plan, masks: IntArray | None = None) -> DeviceResult:
        launched = self._launched
        if launched is None or launched.plan.step != plan.step:
            raise ValueError(f"step {plan.step} is to be sampled before its forward pass")
        needs = launched.needs
        rows = needs.grammar_rows
        if rows.size and (masks is None or masks.shape[0] != plan.sample_slot.size):
            raise ValueError(f"samples {rows.tolist()} have a grammar and need a mask each")
        with torch.inference_mode(), self._on_device():
            if launched.replayed_draw is not None:
                outputs = self._decode.draw(launched.replayed_draw)
            else:
                outputs = self._sampler.draw(
                    launched.computed.logits, plan, needs, launched.staged, masks
                )
            computed = launched.computed
            outputs = {**outputs, "token_finite": computed.token_finite, "pooled": computed.pooled}
            readback = Readback(outputs)
        self._launched = None
        return DeviceResult(plan, launched.known, readback)


def _is_one_by_one(plan: Plan) -> bool:
    """Whether sample i is drawn from row i's logits, for every row."""
    index = plan.sample_logit
    return index.size == plan.row_slot.size and bool((index == np.arange(index.size)).all())
