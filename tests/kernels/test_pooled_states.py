"""Pooled states: the final hidden state of a prompt, on both backends."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.plan_builder import Params
from tests.kernels.tiny import (
    DENSE_FAMILIES,
    FAMILIES,
    memory_checkpoint,
    reference_model,
    tiny_runner,
)

from trunkline.engine.runner import Runner
from trunkline.kernels.cpu.backend import ISA_VARIABLE, THREADS_VARIABLE

BACKENDS = ("cpu", "torch")


class Pooling(Driver):
    """Wants the pooled state of some sequences, where it would have drawn a token."""

    def __init__(self, runner: Runner, pooled: list[Sequence]) -> None:
        super().__init__(runner)
        self.pooled = pooled
        self.states: dict[int, bytes] = {}
        self._wanted: list[Sequence] = []

    def _add_row(self, fields: dict[str, list[Any]], sequence: Sequence, count: int) -> bool:
        is_sampled = super()._add_row(fields, sequence, count)
        if not is_sampled or not any(sequence is one for one in self.pooled):
            return is_sampled
        for name in ("sample_logit", "sample_slot", "sample_position", "sample_flags"):
            fields[name].pop()
        fields["logit_top_n"][-1] = 0
        fields["logit_flags"][-1] = 1
        self._wanted.append(sequence)
        return False

    def step(self, rows: list[tuple[Sequence, int]]) -> dict[str, np.ndarray]:
        self._wanted = []
        result = super().step(rows)
        width = self.runner.config.hidden_size
        assert result["pooled_states"].size == len(self._wanted) * width
        states = result["pooled_states"].reshape(-1, width)
        for sequence, state in zip(self._wanted, states, strict=True):
            self.states[id(sequence)] = state.tobytes()
        return result


def prompts(count: int) -> list[Sequence]:
    generator = np.random.default_rng(11)
    lengths = [1, 16, 17, 128, 129, 300, *generator.integers(1, 300, 26)]
    return [Sequence(generator.integers(0, 199, n).tolist()) for n in lengths[:count]]


def pool(runner: Runner, sequences: list[Sequence], chunk: int | None = None) -> list[bytes]:
    """The states of some sequences, computed together in chunks."""
    driver = Pooling(runner, sequences)
    for sequence in sequences:
        driver.open(sequence)
    while rows := [
        (one, min(chunk or 512, len(one.prompt) - one.computed))
        for one in sequences
        if one.computed < len(one.prompt)
    ]:
        driver.step(rows)
    for sequence in sequences:
        driver.close(sequence)
    return [driver.states[id(sequence)] for sequence in sequences]


@cache
def last_hidden(family: str) -> Any:
    return reference_model(family).model


@pytest.mark.parametrize(
    ("family", "backend"),
    [(family, "torch") for family in FAMILIES] + [(family, "cpu") for family in DENSE_FAMILIES],
)
def test_they_equal_the_last_hidden_state_of_transformers(family: str, backend: str) -> None:
    sequences = prompts(7)
    states = pool(tiny_runner(memory_checkpoint(family), backend=backend), sequences)
    for sequence, state in zip(sequences, states, strict=True):
        with torch.inference_mode():
            output = last_hidden(family)(torch.tensor([sequence.prompt]))
        expected = output.last_hidden_state[0, -1].numpy()
        ours = np.frombuffer(state, np.float32)
        np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_batch_or_chunks(
    dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = memory_checkpoint("llama")
    runs = []
    for threads in (1, 3):
        monkeypatch.setenv(THREADS_VARIABLE, str(threads))
        runner = tiny_runner(
            checkpoint, backend=backend, dtype=dtype, num_pages=2000, max_running_requests=64
        )
        runs.append([pool(runner, [one])[0] for one in prompts(12)])
        runs += [pool(runner, prompts(12), chunk) for chunk in (None, 1, 7, 64)]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_come_from_a_shared_prefix_with_the_same_bits(backend: str) -> None:
    runner = tiny_runner(memory_checkpoint("qwen3"), backend=backend)
    [alone] = pool(runner, [Sequence(list(range(50)))])
    donor, sequence = Sequence([*range(40), 7, 8]), Sequence(list(range(50)))
    driver = Pooling(runner, [sequence])
    driver.open(donor)
    driver.step([(donor, 42)])
    driver.share_prefix(donor, sequence, 40)
    driver.open(sequence)
    driver.step([(donor, 1), (sequence, 10)])
    assert driver.states[id(sequence)] == alone
    assert len(donor.output) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_others_draw_what_they_draw_alone(backend: str) -> None:
    runner = tiny_runner(memory_checkpoint("llama"), backend=backend)
    params = Params(temperature=0.9, seed=5)
    alone, beside = (Sequence(list(range(20)), params) for _ in range(2))
    Driver(runner).generate([alone], 4)
    pooled = Sequence([3, 4, 5])
    driver = Pooling(runner, [pooled])
    driver.open(beside)
    driver.open(pooled)
    driver.step([(pooled, 3), (beside, 20)])
    for _ in range(3):
        driver.step([(beside, 1)])
    assert (beside.output, beside.logprobs) == (alone.output, alone.logprobs)


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_instruction_set_of_the_cpu_has_them(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    checkpoint = memory_checkpoint("llama")
    [ours] = pool(tiny_runner(checkpoint, backend="cpu"), prompts(6)[5:])
    [reference] = pool(tiny_runner(checkpoint, backend="torch"), prompts(6)[5:])
    left, right = (np.frombuffer(state, np.float32) for state in (ours, reference))
    np.testing.assert_allclose(left, right, atol=2e-4, rtol=2e-4)
