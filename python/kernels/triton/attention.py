"""Which kernels attend: FlashInfer where it can, else Triton's; one order of sums if asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from trunkline.kernels.interface import BackendOptions, OptionError
from trunkline.kernels.specs import AttentionSpec
from trunkline.kernels.triton.attention_parts import workspace_elements
from trunkline.kernels.triton.batch import DeviceBatch, HostRows
from trunkline.kernels.triton.decode_attention import choose_max_splits, decode_attention
from trunkline.kernels.triton.launch import ceil_div, device_traits
from trunkline.kernels.triton.prompt_attention import prompt_attention
from trunkline.kernels.triton.unified_attention import SPLIT_SIZE as UNIFIED_SPLIT_SIZE
from trunkline.kernels.triton.unified_attention import (
    unified_attention,
    unified_workspace_elements,
)

ATTENTION_BACKENDS = ("auto", "flashinfer", "triton")
SPLIT_SIZE = 256  # least number of keys in a split: fewer do not pay for their merge
PROMPT_BLOCK_TOKENS = 32  # about what a block of prompt attention has

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """Attends over the pool, which already holds the step's own keys and values."""

    name: str
    # Rows of one token that come first are given apart from the others; else all are alike.
    separates_decode: bool

    def prepare(self, batch: DeviceBatch, rows: HostRows) -> None:
        """Before each forward pass, also before one that is replayed.

        Args:
            batch: the step; in a replayed one, of the bucket's size.
            rows: its rows, without padding.
        """

    def attend(
        self, query: torch.Tensor, spec: AttentionSpec, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """Attend causally; `query` and `out` are `[tokens, heads, head_dim]`."""

    def captured_bytes(self, buckets: Sequence[int], pages_per_row: int) -> int:
        """What it keeps for captured steps of so many rows; to be asked once it has attended."""


class TritonAttention:
    """One kernel for rows of one token, split over their keys, and one for all others."""

    name = "triton"
    separates_decode = True

    def prepare(self, batch: DeviceBatch, rows: HostRows) -> None:
        pass

    def attend(
        self, query: torch.Tensor, spec: AttentionSpec, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        layer = batch.layer(spec)
        decode = batch.num_decode_rows
        if decode:
            splits = _max_splits(decode, spec, batch)
            decode_attention(
                query[:decode],
                layer,
                batch.row_slot[:decode],
                batch.kv_lens[:decode],
                out[:decode],
                _workspace(query[:decode], splits),
                split_size=SPLIT_SIZE,
                max_splits=splits,
            )
        if query.shape[0] > decode:
            prompt = query[decode:]
            # Blocks of tokens times kv heads are the programs that there are without splits.
            blocks = ceil_div(prompt.shape[0], PROMPT_BLOCK_TOKENS)
            splits = _max_splits(blocks, spec, batch)
            prompt_attention(
                prompt,
                layer,
                batch.row_slot[decode:],
                batch.kv_lens[decode:],
                batch.query_start,
                out[decode:],
                _workspace(prompt, splits),
                max_query_len=batch.max_query_len,
                split_size=SPLIT_SIZE,
                max_splits=splits,
            )

    def captured_bytes(self, buckets: Sequence[int], pages_per_row: int) -> int:
        return 0


class UnifiedAttention:
    """One kernel for every row: a token's sums have one order, whatever the step looks like."""

    name = "unified"
    separates_decode = False

    def prepare(self, batch: DeviceBatch, rows: HostRows) -> None:
        pass

    def attend(
        self, query: torch.Tensor, spec: AttentionSpec, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        if batch.is_captured:
            out.zero_()  # padding rows are not written: what lies there would grow in each layer
        unified_attention(
            query,
            batch.layer(spec),
            batch.row_slot,
            batch.kv_lens,
            batch.query_start,
            out,
            _unified_workspace(query, spec, batch),
            max_kv_len=batch.max_kv_len,
        )

    def captured_bytes(self, buckets: Sequence[int], pages_per_row: int) -> int:
        return 0


def create_attention(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, options: BackendOptions
) -> Attention:
    """Choose by options and capability: flashinfer, then triton.

    Raises:
        OptionError: the option is unknown, or FlashInfer is asked for and cannot run here.
    """
    wanted = options.attention
    if wanted not in ATTENTION_BACKENDS:
        raise OptionError(
            f"attention_backend {wanted!r} is not supported by the triton backend; known: "
            f"{', '.join(ATTENTION_BACKENDS)}"
        )
    if options.deterministic:
        if wanted == "flashinfer":
            raise OptionError("FlashInfer's order of sums varies: it is not deterministic")
        return UnifiedAttention()
    if wanted == "triton":
        return TritonAttention()
    from trunkline.kernels import flashinfer

    reason = flashinfer.why_not(device, dtype)
    if reason is None:
        return flashinfer.FlashInferAttention(device, dtype, kv_dtype, TritonAttention())
    if wanted == "flashinfer":
        raise OptionError(f"attention_backend flashinfer cannot be used: {reason}")
    logger.info("Attention by Triton, not FlashInfer: %s", reason)
    return TritonAttention()


def _max_splits(num_rows: int, spec: AttentionSpec, batch: DeviceBatch) -> int:
    """Splits that keep the device busy, if the longest possible row has so many."""
    traits = device_traits(batch.row_slot.device)
    longest = _longest(batch)
    wanted = choose_max_splits(num_rows, spec.num_kv_heads, traits.num_processors)
    return min(wanted, ceil_div(longest, SPLIT_SIZE))


def _longest(batch: DeviceBatch) -> int:
    if batch.max_kv_len is not None:
        return batch.max_kv_len
    return batch.page_tables.shape[1] * batch.pool.spec.page_size


def _unified_workspace(
    query: torch.Tensor, spec: AttentionSpec, batch: DeviceBatch
) -> torch.Tensor:
    """Of a size for splits where there are so few tokens that they gain by them."""
    heads, head_dim, longest = spec.num_heads, spec.head_dim, _longest(batch)
    processors = device_traits(query.device).num_processors
    most = unified_workspace_elements(heads, spec.num_kv_heads, head_dim, longest, processors)
    splits = ceil_div(longest, UNIFIED_SPLIT_SIZE)
    needed = workspace_elements(query.shape[0], heads, head_dim, splits)
    return query.new_empty(needed if needed <= most else 1, dtype=torch.float32)


def _workspace(query: torch.Tensor, splits: int) -> torch.Tensor:
    """For partial results, which there are with several splits only."""
    rows, heads, head_dim = query.shape
    elements = workspace_elements(rows, heads, head_dim, splits) if splits > 1 else 1
    return query.new_empty(elements, dtype=torch.float32)
