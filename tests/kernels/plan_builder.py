"""Writes plan blocks without the Rust core, and reads result blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trunkline.plan import (
    PLAN_HEADER_BYTES,
    PLAN_MAGIC,
    PLAN_SECTIONS,
    RESULT_MAGIC,
    RESULT_SECTIONS,
    SECTION_TABLE_WORD,
    VERSION,
    Plan,
)


def build_plan(step: int, sections: dict[str, Any]) -> Plan:
    """A plan with the given sections; the others are empty."""
    unknown = sections.keys() - {name for name, _, _ in PLAN_SECTIONS}
    assert not unknown, unknown
    header = np.zeros(PLAN_HEADER_BYTES // 8, np.int64)
    header[:4] = (PLAN_MAGIC, VERSION, step, 0)
    parts = [header.view(np.uint8)]
    offset = PLAN_HEADER_BYTES
    for index, (name, dtype, width) in enumerate(PLAN_SECTIONS):
        array = np.asarray(sections.get(name, []), dtype=dtype).reshape(-1)
        assert array.size % width == 0, name
        header[SECTION_TABLE_WORD + 2 * index] = offset
        header[SECTION_TABLE_WORD + 2 * index + 1] = array.size
        raw = array.view(np.uint8)
        parts.append(np.pad(raw, (0, -raw.size % 8)))
        offset += parts[-1].size
    header[4] = offset
    header[5] = len(sections.get("row_slot", []))
    header[6] = len(sections.get("token_ids", []))
    return Plan(np.concatenate(parts))


def read_result(block: np.ndarray) -> dict[str, np.ndarray]:
    """The sections of a result block, and its step."""
    words = block[:256].view(np.int64)
    assert words[0] == RESULT_MAGIC
    assert words[4] == block.size
    sections: dict[str, np.ndarray] = {"step": words[2]}
    for index, (name, dtype, _) in enumerate(RESULT_SECTIONS):
        offset, count = words[SECTION_TABLE_WORD + 2 * index : SECTION_TABLE_WORD + 2 * index + 2]
        size = count * np.dtype(dtype).itemsize
        sections[name] = block[offset : offset + size].view(dtype).copy()
    return sections


@dataclass
class Params:
    """Sampling parameters of one sequence; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    top_k: int = 0
    min_new_tokens: int = 0
    grammar: bool = False
    processed: bool = False
    seed: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    suppressed: list[int] = field(default_factory=list)


@dataclass
class Opened:
    """A slot that a plan opens."""

    slot: int
    prompt_len: int
    params: Params
    output_ids: list[int] = field(default_factory=list)


def opened_sections(records: list[Opened]) -> dict[str, Any]:
    """The plan's sections 1..11."""
    floats, ints = [], []
    for record in records:
        p = record.params
        floats.append(
            [p.temperature, p.top_p, p.min_p, p.frequency, p.presence, p.repetition, 0, 0]
        )
        flags = p.grammar + 2 * p.processed
        ints.append([p.top_k, record.prompt_len, p.min_new_tokens, 0, flags, 0, 0, 0])

    def ragged(lists: list[list[Any]]) -> tuple[list[int], list[Any]]:
        offsets = np.concatenate([[0], np.cumsum([len(entry) for entry in lists])])
        return offsets.astype(int).tolist(), [value for entry in lists for value in entry]

    bias_offsets, bias_ids = ragged([list(r.params.bias) for r in records])
    _, bias_values = ragged([list(r.params.bias.values()) for r in records])
    suppressed_offsets, suppressed_ids = ragged([r.params.suppressed for r in records])
    output_offsets, output_ids = ragged([r.output_ids for r in records])
    return {
        "opened_slots": [record.slot for record in records],
        "opened_float": floats,
        "opened_int": ints,
        "opened_seed": np.array([r.params.seed for r in records], np.uint64).view(np.int64),
        "bias_offsets": bias_offsets,
        "bias_ids": bias_ids,
        "bias_values": bias_values,
        "suppressed_offsets": suppressed_offsets,
        "suppressed_ids": suppressed_ids,
        "output_offsets": output_offsets,
        "output_ids": output_ids,
    }
