"""Models on the CPU kernels: against the reference backend, and the same bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.plan_builder import Params
from tests.kernels.tiny import DENSE_FAMILIES, memory_checkpoint, tiny_runner

from trunkline.engine.runner import Runner
from trunkline.kernels import select_backend
from trunkline.kernels.cpu.backend import ISA_VARIABLE, THREADS_VARIABLE, CpuBackend
from trunkline.kernels.cpu.native import cpu_isas

ISAS = ("avx512_bf16", "avx2", "portable")
SAMPLED = Params(temperature=0.9, top_p=0.95, top_k=50, frequency=0.5, repetition=1.1, seed=5)


def requests(count: int = 8) -> list[Sequence]:
    generator = np.random.default_rng(9)
    lengths = [1, 16, 17, 64, 65, 130, 257, 300, *generator.integers(1, 300, 56)]
    return [
        Sequence(generator.integers(0, 199, length).tolist(), SAMPLED if index % 2 else Params())
        for index, length in enumerate(lengths)
    ][:count]


def generate(runner: Runner, sequences: list[Sequence], chunk: int | None = None) -> list[Sequence]:
    Driver(runner).generate(sequences, 10, chunk=chunk)
    return sequences


def bits(sequences: list[Sequence]) -> list[tuple[object, ...]]:
    return [(s.output, s.logprobs, s.tops, s.errors) for s in sequences]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_float32_generates_what_the_reference_generates(family: str) -> None:
    checkpoint = memory_checkpoint(family)
    ours, reference = (
        generate(tiny_runner(checkpoint, backend=name), requests()) for name in ("cpu", "torch")
    )
    for left, right in zip(ours, reference, strict=True):
        assert left.output == right.output
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window", "gemma2"])
def test_bfloat16_is_as_close_to_float32_as_rounding_allows(family: str) -> None:
    """Teacher-forced: prompts end in what float32 generated."""
    checkpoint = memory_checkpoint(family)
    exact = generate(tiny_runner(checkpoint, backend="torch"), requests())
    errors = {}
    for name in ("cpu", "torch"):
        runner = tiny_runner(checkpoint, backend=name, dtype="bfloat16")
        differences = []
        for sequence in exact:
            forced = Sequence(sequence.prompt + sequence.output[:-1])
            Driver(runner, top_n=199).generate([forced], 1)
            ours = dict(forced.tops[0])
            differences += [abs(ours[token] - value) for token, value in sequence.tops[-1]]
        errors[name] = float(np.mean(differences))
    # The reference rounds after every operation, the kernels where they multiply.
    assert errors["cpu"] < 1.2 * errors["torch"] + 0.01, errors


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "bfloat16")]
)
def test_bits_do_not_depend_on_batch_chunks_or_threads(
    family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = memory_checkpoint(family)
    runs = []
    for threads in (1, 2, 3):
        monkeypatch.setenv(THREADS_VARIABLE, str(threads))
        runner = tiny_runner(
            checkpoint, backend="cpu", dtype=dtype, num_pages=2000, max_running_requests=64
        )
        assert isinstance(runner.backend, CpuBackend)
        assert runner.backend.num_threads == threads
        runs.append(bits(generate(runner, requests(64), chunk=(None, 23, 1)[threads - 1])))
    alone = [bits(generate(runner, [request]))[0] for request in requests(64)]
    for run in runs:
        assert run == alone


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in cpu_isas():
        pytest.skip(f"not run: this processor does not have {isa}")
    monkeypatch.setenv(ISA_VARIABLE, isa)
    checkpoint = memory_checkpoint(family)
    runner = tiny_runner(checkpoint, backend="cpu")
    assert isinstance(runner.backend, CpuBackend)
    assert runner.backend.isa == isa
    reference = generate(tiny_runner(checkpoint, backend="torch"), requests())
    assert [s.output for s in generate(runner, requests())] == [s.output for s in reference]
    rounded = tiny_runner(checkpoint, backend="cpu", dtype="bfloat16")
    together = bits(generate(rounded, requests()))
    assert together == [bits(generate(rounded, [r], chunk=7))[0] for r in requests()]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (ISA_VARIABLE, "sse9", "use avx512_bf16, avx2 or portable"),
        (THREADS_VARIABLE, "0", "from 1 to 1024"),
        (THREADS_VARIABLE, "two", "from 1 to 1024"),
    ],
)
def test_settings_that_cannot_be_honoured(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        select_backend(torch.device("cpu"), torch.float32, "cpu")


def test_it_is_the_default_on_the_cpu_where_it_has_kernels() -> None:
    cpu = torch.device("cpu")
    assert select_backend(cpu, torch.bfloat16).name == "cpu"
    assert select_backend(cpu, torch.float32).name == "cpu"
    assert select_backend(cpu, torch.float16).name == "torch"


def test_heads_that_are_too_large_are_refused() -> None:
    checkpoint = memory_checkpoint("llama")
    wide = dict(checkpoint.weights)
    for name, tensor in wide.items():
        if "self_attn" in name:
            shape = (tensor.shape[0] * 66, 48) if "o_proj" not in name else (48, 48 * 66)
            wide[name] = torch.zeros(shape)
    config = memory_checkpoint("llama", head_dim=8 * 66).config
    with pytest.raises(ValueError, match="head_dim is 528"):
        tiny_runner(type(checkpoint)(config, wide), backend="cpu")


def test_weights_may_be_loaded_again() -> None:
    first, second = memory_checkpoint("llama-tied", seed=0), memory_checkpoint("llama-tied", seed=1)
    runner = tiny_runner(first, backend="cpu")
    before = generate(runner, requests(4))
    for prefix, weight in runner.model.weights():
        for part in weight.shapes:
            weight.load(part, second.weights[prefix + part])
    after = generate(runner, requests(4))
    expected = generate(tiny_runner(second, backend="cpu"), requests(4))
    assert bits(after) == bits(expected)
    assert bits(after) != bits(before)


def test_memory_is_reported() -> None:
    checkpoint = memory_checkpoint("llama", head_dim=8)
    memory = tiny_runner(checkpoint, backend="cpu").memory
    # Heads are stored in whole vectors of 16 elements.
    assert memory.page_bytes == 3 * 2 * 2 * 16 * 16 * 4
    assert memory.pool_bytes == 400 * memory.page_bytes
    parameters = sum(tensor.numel() for tensor in checkpoint.weights.values())
    assert parameters * 4 <= memory.weight_bytes <= parameters * 4 * 2
