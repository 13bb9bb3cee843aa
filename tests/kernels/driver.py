"""A naive scheduler for tests: it runs sequences through a runner exactly as it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.kernels.plan_builder import Opened, Params, build_plan, opened_sections, read_result

from trunkline.engine.runner import Runner


@dataclass
class Sequence:
    """One sample: its tokens so far, what of them is computed, and what its draws reported."""

    prompt: list[int]
    params: Params = field(default_factory=Params)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    slot: int = -1
    sampled: bool = False  # in this slot: its last token is on the device
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Owns slots and pages; every method but `step` only prepares the next plan."""

    def __init__(self, runner: Runner, top_n: int = 2, device_tokens: bool = True) -> None:
        self.runner = runner
        self.page_size = runner.options.page_size
        self.top_n = top_n
        self.device_tokens = device_tokens
        self.free_pages = list(range(runner.options.num_pages - 1, 0, -1))
        self.free_slots = list(range(runner.options.max_running_requests - 1, -1, -1))
        self.steps = 0
        self._opened: list[Opened] = []
        self._closed: list[int] = []
        self._writes: list[list[int]] = []
        self._moves: list[list[int]] = []

    def open(self, sequence: Sequence) -> None:
        sequence.slot = self.free_slots.pop()
        sequence.sampled = False
        record = Opened(sequence.slot, len(sequence.prompt), sequence.params, sequence.output[:])
        self._opened.append(record)
        for index, page in enumerate(sequence.pages):
            self._writes.append([0, sequence.slot, index, page])

    def close(self, sequence: Sequence, keep_pages: bool = False) -> None:
        self._closed.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        if not keep_pages:
            self.free_pages.extend(reversed(sequence.pages))
            sequence.pages = []
            sequence.computed = 0

    def share_prefix(self, donor: Sequence, sequence: Sequence, num_tokens: int) -> None:
        """Give `sequence` (not open yet) the donor's KV: whole pages, then a partial copy."""
        whole, rest = divmod(num_tokens, self.page_size)
        sequence.pages = donor.pages[:whole]
        if rest:
            page = self.free_pages.pop()
            self._moves.append([0, donor.pages[whole], 0, page, rest, 0])
            sequence.pages.append(page)
        sequence.computed = num_tokens

    def step(self, rows: list[tuple[Sequence, int]]) -> dict[str, np.ndarray]:
        """Compute `n` tokens of each sequence; sample where all its tokens are computed then."""
        sections: dict[str, Any] = {"closed_slots": self._closed, **opened_sections(self._opened)}
        fields: dict[str, list[Any]] = {
            name: []
            for name in (
                "row_slot row_query_len row_computed_len row_token_source token_ids positions "
                "logit_tokens logit_top_n logit_flags score_ids sample_logit sample_slot "
                "sample_position sample_flags"
            ).split()
        }
        fields["score_offsets"] = [0]
        sampled = [seq for seq, count in rows if self._add_row(fields, seq, count)]
        sections |= fields
        sections |= {"page_writes": self._writes, "page_moves": self._moves}
        self._opened, self._closed, self._writes, self._moves = [], [], [], []
        self.steps += 1
        result = read_result(self.runner.execute(build_plan(self.steps, sections)))
        assert result["step"] == self.steps
        self._take(rows, sampled, result)
        return result

    def _add_row(self, fields: dict[str, list[Any]], sequence: Sequence, count: int) -> bool:
        tokens = sequence.tokens
        start, end = sequence.computed, sequence.computed + count
        assert end <= len(tokens)
        while len(sequence.pages) * self.page_size < end:
            page = self.free_pages.pop()
            self._writes.append([0, sequence.slot, len(sequence.pages), page])
            sequence.pages.append(page)
        ids = tokens[start:end]
        on_device = self.device_tokens and sequence.sampled and end == len(tokens)
        fields["row_slot"].append(sequence.slot)
        fields["row_query_len"].append(count)
        fields["row_computed_len"].append(start)
        fields["row_token_source"].append(1 if on_device else 0)
        fields["token_ids"] += [*ids[:-1], 0] if on_device else ids
        fields["positions"] += range(start, end)
        sequence.computed = end
        if end < len(tokens):
            return False
        fields["sample_logit"].append(len(fields["logit_tokens"]))
        fields["logit_tokens"].append(len(fields["token_ids"]) - 1)
        fields["logit_top_n"].append(self.top_n)
        fields["logit_flags"].append(0)
        fields["score_offsets"].append(0)
        fields["sample_slot"].append(sequence.slot)
        fields["sample_position"].append(len(tokens))
        fields["sample_flags"].append(1)
        return True

    def _take(
        self,
        rows: list[tuple[Sequence, int]],
        sampled: list[Sequence],
        result: dict[str, np.ndarray],
    ) -> None:
        if result["row_errors"].size:
            for (sequence, _), error in zip(rows, result["row_errors"].tolist(), strict=True):
                sequence.errors.append(error)
        assert result["token_ids"].size == len(sampled)
        for index, sequence in enumerate(sampled):
            sequence.output.append(int(result["token_ids"][index]))
            sequence.sampled = True
            sequence.logprobs.append(float(result["sampled_logprobs"][index]))
            top = slice(index * self.top_n, (index + 1) * self.top_n)
            pairs = zip(result["top_ids"][top], result["top_logprobs"][top], strict=True)
            sequence.tops.append([(int(token), float(value)) for token, value in pairs])

    def generate(
        self, sequences: list[Sequence], num_tokens: int, chunk: int | None = None
    ) -> None:
        """Open, run and close sequences together; each ends with `num_tokens` outputs."""
        for sequence in sequences:
            self.open(sequence)
        running = list(sequences)
        while running:
            rows = []
            for sequence in running:
                left = len(sequence.tokens) - sequence.computed
                rows.append((sequence, min(left, chunk or left)))
            self.step(rows)
            for sequence in [s for s in running if len(s.output) >= num_tokens]:
                self.close(sequence, keep_pages=True)
                running.remove(sequence)

    def release(self, sequences: list[Sequence]) -> None:
        """Give the pages of closed sequences back."""
        for sequence in sequences:
            self.free_pages.extend(reversed(sequence.pages))
            sequence.pages = []
