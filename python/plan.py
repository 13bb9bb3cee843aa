"""The step blocks shared with the Rust scheduler: `Plan` (in) and `StepResult` (out).

Both are one contiguous little-endian buffer: a header of int64 words (magic, version, step id, ...,
then a table of `(byte offset, element count)` per section) followed by the sections, each aligned
to 8 bytes. `docs/plan.md` lists the sections and their meaning; the tables below are its code form,
and `rust/scheduler/src/plan.rs` is the other side. This module knows the layout and nothing of
models or scheduling.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

PLAN_MAGIC: Final = int.from_bytes(b"TRNKPLAN", "little")
RESULT_MAGIC: Final = int.from_bytes(b"TRNKRSLT", "little")
VERSION: Final = 1
SECTION_TABLE_WORD: Final = 8
PLAN_HEADER_BYTES: Final = 1024
RESULT_HEADER_BYTES: Final = 256

Array = npt.NDArray[np.generic]

# (name, dtype, elements per record): the order is the section number.
PLAN_SECTIONS: Final = (
    ("closed_slots", np.int32, 1),
    ("opened_slots", np.int32, 1),
    ("opened_float", np.float32, 8),
    ("opened_int", np.int32, 8),
    ("opened_seed", np.int64, 1),
    ("bias_offsets", np.int32, 1),
    ("bias_ids", np.int32, 1),
    ("bias_values", np.float32, 1),
    ("suppressed_offsets", np.int32, 1),
    ("suppressed_ids", np.int32, 1),
    ("output_offsets", np.int32, 1),
    ("output_ids", np.int32, 1),
    ("row_slot", np.int32, 1),
    ("row_query_len", np.int32, 1),
    ("row_computed_len", np.int32, 1),
    ("row_token_source", np.int32, 1),
    ("token_ids", np.int32, 1),
    ("positions", np.int32, 1),
    ("page_writes", np.int32, 4),
    ("page_moves", np.int32, 6),
    ("logit_tokens", np.int32, 1),
    ("logit_top_n", np.int32, 1),
    ("logit_flags", np.int32, 1),
    ("score_offsets", np.int32, 1),
    ("score_ids", np.int32, 1),
    ("sample_logit", np.int32, 1),
    ("sample_slot", np.int32, 1),
    ("sample_position", np.int32, 1),
    ("sample_flags", np.int32, 1),
)
RESULT_SECTIONS: Final = (
    ("sample_counts", np.int32, 1),
    ("token_ids", np.int32, 1),
    ("row_computed", np.int32, 1),
    ("row_errors", np.int32, 1),
    ("sampled_logprobs", np.float32, 1),
    ("score_logprobs", np.float32, 1),
    ("top_ids", np.int32, 1),
    ("top_logprobs", np.float32, 1),
    ("pooled_states", np.float32, 1),
)

# Columns of `opened_float` and `opened_int`.
TEMPERATURE, TOP_P, MIN_P, FREQUENCY_PENALTY, PRESENCE_PENALTY, REPETITION_PENALTY = range(6)
TOP_K, PROMPT_LEN, MIN_NEW_TOKENS, ADAPTER, OPEN_FLAGS, MIN_GRAMMAR_TOKENS = range(6)
GRAMMAR_REQUEST: Final = slice(6, 8)  # one int64
# Bits of `opened_int[:, OPEN_FLAGS]`.
FLAG_GRAMMAR: Final = 1
FLAG_PROCESSED: Final = 2
# Values of `row_token_source`.
SOURCE_HOST, SOURCE_LAST_SAMPLED = range(2)
# Bits of `logit_flags`.
LOGIT_POOLED: Final = 1
# Bits of `sample_flags`.
SAMPLE_LOGPROB: Final = 1
# Values of `row_errors`.
ROW_OK, ROW_NOT_FINITE, ROW_GRAMMAR_VIOLATED, ROW_FAILED, ROW_GRAMMAR_TOO_SLOW = range(5)


class Plan:
    """What one step computes, as NumPy views into the arena that the scheduler wrote.

    The views are valid until the arena is handed to `Core.plan` again. Sections are attributes
    named as in `PLAN_SECTIONS`: 1-D for one element per record, else `[records, elements]`.
    """

    __slots__ = ("_words", "arena", *(name for name, _, _ in PLAN_SECTIONS))

    closed_slots: npt.NDArray[np.int32]
    opened_slots: npt.NDArray[np.int32]
    opened_float: npt.NDArray[np.float32]
    opened_int: npt.NDArray[np.int32]
    opened_seed: npt.NDArray[np.int64]
    bias_offsets: npt.NDArray[np.int32]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    suppressed_offsets: npt.NDArray[np.int32]
    suppressed_ids: npt.NDArray[np.int32]
    output_offsets: npt.NDArray[np.int32]
    output_ids: npt.NDArray[np.int32]
    row_slot: npt.NDArray[np.int32]
    row_query_len: npt.NDArray[np.int32]
    row_computed_len: npt.NDArray[np.int32]
    row_token_source: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    page_writes: npt.NDArray[np.int32]
    page_moves: npt.NDArray[np.int32]
    logit_tokens: npt.NDArray[np.int32]
    logit_top_n: npt.NDArray[np.int32]
    logit_flags: npt.NDArray[np.int32]
    score_offsets: npt.NDArray[np.int32]
    score_ids: npt.NDArray[np.int32]
    sample_logit: npt.NDArray[np.int32]
    sample_slot: npt.NDArray[np.int32]
    sample_position: npt.NDArray[np.int32]
    sample_flags: npt.NDArray[np.int32]

    def __init__(self, arena: npt.NDArray[np.uint8]) -> None:
        """Parse the block at the start of `arena`.

        Args:
            arena: 1-D uint8 array, 8-byte aligned, that `Core.plan` has written.

        Raises:
            ValueError: the block has another magic number or layout version.
        """
        words = arena[:PLAN_HEADER_BYTES].view(np.int64).tolist()
        if words[0] != PLAN_MAGIC or words[1] != VERSION:
            raise ValueError(f"not a plan of layout version {VERSION}: {words[:2]}")
        self.arena = arena
        self._words = words
        table = iter(words[SECTION_TABLE_WORD : SECTION_TABLE_WORD + 2 * len(PLAN_SECTIONS)])
        for (name, dtype, width), offset, count in zip(PLAN_SECTIONS, table, table, strict=True):
            shape = count if width == 1 else (count // width, width)
            setattr(self, name, np.ndarray(shape, dtype, arena, offset))

    @property
    def step(self) -> int:
        """Id of the step, to be repeated in its result."""
        return int(self._words[2])

    @property
    def weight_epoch(self) -> int:
        """Which weights the step runs on."""
        return int(self._words[3])


def encode_result(step: int, sections: dict[str, Array]) -> npt.NDArray[np.uint8]:
    """Build the block that `Core.commit` takes.

    Args:
        step: id of the plan that was executed.
        sections: arrays by the names of `RESULT_SECTIONS`; a missing one is empty.

    Returns:
        1-D uint8 array.
    """
    header = np.zeros(RESULT_HEADER_BYTES // 8, dtype=np.int64)
    header[:3] = (RESULT_MAGIC, VERSION, step)
    parts: list[npt.NDArray[np.uint8]] = [header.view(np.uint8)]
    offset = RESULT_HEADER_BYTES
    for index, (name, dtype, _) in enumerate(RESULT_SECTIONS):
        array = sections.get(name)
        count = 0 if array is None else array.size
        header[SECTION_TABLE_WORD + 2 * index] = offset
        header[SECTION_TABLE_WORD + 2 * index + 1] = count
        if array is None or count == 0:
            continue
        raw = np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8)
        padding = -raw.size % 8
        parts.append(raw if padding == 0 else np.pad(raw, (0, padding)))
        offset += raw.size + padding
    header[4] = offset
    return np.concatenate(parts)


def decode_result(block: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """The sections of a result block by their names, as views into it."""
    words = block[:RESULT_HEADER_BYTES].view(np.int64).tolist()
    table = iter(words[SECTION_TABLE_WORD : SECTION_TABLE_WORD + 2 * len(RESULT_SECTIONS)])
    return {
        name: np.ndarray(count, dtype, block, offset)
        for (name, dtype, _), offset, count in zip(RESULT_SECTIONS, table, table, strict=True)
    }
