"""From a plan to the arrays that a forward pass reads: index arithmetic on the host, no device.

Steps in which every row has one token are padded to a bucket; their arrays come in a fixed order
and size, so that they lie at fixed addresses of the staging arena.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trunkline.kernels.interface import IntArray
from trunkline.kernels.triton.batch import HostRows
from trunkline.plan import LOGIT_POOLED, SOURCE_LAST_SAMPLED, Plan

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]


def token_rows(plan: Plan) -> npt.NDArray[np.int64]:
    """Row of every flat token."""
    return np.repeat(np.arange(plan.row_slot.size), plan.row_query_len)


def prompt_arrays(
    plan: Plan, known: BoolArray, rows: HostRows, num_decode_rows: int
) -> dict[str, Array]:
    """Arrays of a step of any shape.

    Args:
        plan: the step.
        known: which of its token ids the vocabulary has; the others become 0.
        rows: its rows' lengths.
        num_decode_rows: leading rows that the lengths of queries leave out.
    """
    query_lens = rows.query_lens[num_decode_rows:]
    from_device = np.flatnonzero(plan.row_token_source == SOURCE_LAST_SAMPLED)
    source = np.full(plan.token_ids.size, -1, np.int64)
    source[np.cumsum(plan.row_query_len)[from_device] - 1] = plan.row_slot[from_device]
    pooled = (plan.logit_flags & LOGIT_POOLED) != 0
    return {
        "token_ids": np.where(known, plan.token_ids, 0).astype(np.int32),
        "token_source": source,
        "positions": plan.positions,
        "token_slot": np.repeat(plan.row_slot, plan.row_query_len),
        "row_slot": plan.row_slot,
        "kv_lens": rows.kv_lens,
        "query_start": np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        "logit_tokens": plan.logit_tokens,
        "pooled_tokens": plan.logit_tokens[pooled],
    }


def decode_arrays(plan: Plan, known: BoolArray, bucket: int, padding_slot: int) -> dict[str, Array]:
    """Arrays of a step whose rows have one token each, with logits; padded to `bucket` rows.

    Samples are padded too: they draw for the padding slot.
    """
    from_device = plan.row_token_source == SOURCE_LAST_SAMPLED
    return {
        "token_ids": _padded(np.where(known, plan.token_ids, 0), bucket, 0, np.int32),
        "token_source": _padded(np.where(from_device, plan.row_slot, -1), bucket, -1, np.int64),
        "positions": _padded(plan.positions, bucket, 0, np.int32),
        "token_slot": _padded(plan.row_slot, bucket, -1, np.int32),
        "row_slot": _padded(plan.row_slot, bucket, padding_slot, np.int32),
        "kv_lens": _padded(plan.row_computed_len + 1, bucket, 0, np.int32),
        "query_start": np.minimum(np.arange(bucket + 1), plan.row_slot.size).astype(np.int32),
        "sample_logit": np.arange(bucket, dtype=np.int32),
        "sample_slot": _padded(plan.sample_slot[:bucket], bucket, padding_slot, np.int32),
        "sample_position": _padded(plan.sample_position[:bucket], bucket, 0, np.int32),
    }


def padding_arrays(bucket: int, padding_slot: int) -> dict[str, Array]:
    """`decode_arrays` of no rows at all: what a bucket is captured with."""
    zeros = np.zeros(bucket, np.int32)
    return {
        "token_ids": zeros,
        "token_source": np.full(bucket, -1, np.int64),
        "positions": zeros,
        "token_slot": np.full(bucket, -1, np.int32),
        "row_slot": np.full(bucket, padding_slot, np.int32),
        "kv_lens": zeros,
        "query_start": np.zeros(bucket + 1, np.int32),
        "sample_logit": np.arange(bucket, dtype=np.int32),
        "sample_slot": np.full(bucket, padding_slot, np.int32),
        "sample_position": zeros,
    }


def move_array(plan: Plan) -> dict[str, Array]:
    """Page moves that copy something, `[moves, 3]`: source, destination, tokens."""
    moves = plan.page_moves[plan.page_moves[:, 4] > 0][:, [1, 3, 4]]
    return {"moves": np.ascontiguousarray(moves)} if moves.size else {}


def _padded(values: IntArray, size: int, filler: int, dtype: type[np.integer[Any]]) -> Array:
    result = np.full(size, filler, dtype)
    result[: values.size] = values
    return result
