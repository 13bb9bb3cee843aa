"""Quantised weights on the CPU kernels: the arithmetic that is documented, the same bits always."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.gguf_files import TinyGguf
from tests.kernels.cpu_programs import SIZES
from tests.kernels.driver import Driver, Sequence
from tests.kernels.plan_builder import Opened, Params, build_plan, opened_sections, read_result
from tests.kernels.tiny import FAMILIES, MemoryCheckpoint, memory_checkpoint, tiny_runner

from trunkline.engine.config import ModelOptions
from trunkline.engine.models.decoder import ForwardResult
from trunkline.engine.quantization import LARGE_BYTES, Stored, resolve_quantization
from trunkline.engine.runner import Runner, RunnerOptions
from trunkline.engine.weights import open_checkpoint
from trunkline.kernels import (
    BackendOptions,
    BlockTensor,
    LinearPart,
    LinearSpec,
    ProgramBackend,
    select_backend,
)
from trunkline.kernels.cpu.backend import ISA_VARIABLE, THREADS_VARIABLE
from trunkline.kernels.cpu.native import cpu_block_kinds, cpu_isas
from trunkline.kernels.torch_reference.backend import TorchBackend

CPU = torch.device("cpu")
INT8 = BackendOptions(quantization="int8")
DENSE = [family for family in FAMILIES if "moe" not in family]  # it has no experts
BLOCK = 32
SAMPLED = Params(temperature=0.9, top_p=0.95, top_k=50, frequency=0.5, repetition=1.1, seed=5)


def requests(count: int = 8) -> list[Sequence]:
    generator = np.random.default_rng(9)
    lengths = [1, 16, 17, 64, 65, 130, 257, 300, *generator.integers(1, 300, 24)]
    return [
        Sequence(
            generator.integers(0, 199, length).tolist(),
            SAMPLED if index % 2 else Params(),
        )
        for index, length in enumerate(lengths)
    ][:count]


def generate(runner: Runner, sequences: list[Sequence], chunk: int | None = None) -> list[Sequence]:
    Driver(runner).generate(sequences, 10, chunk=chunk)
    return sequences


def bits(sequences: list[Sequence]) -> list[tuple[object, ...]]:
    return [(s.output, s.logprobs, s.tops, s.errors) for s in sequences]


def eight_bits(values: torch.Tensor, scale_type: torch.dtype) -> torch.Tensor:
    """Rounded to 127 steps to each side of zero, with a scale per 32 along the last dimension."""
    rows, width = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -width % BLOCK))
    blocks = padded.reshape(rows, -1, BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(scale_type).float()
    steps = torch.where(scale > 0, blocks / scale, 0).round().clamp(-127, 127)
    return (steps * scale).reshape(rows, -1)[:, :width]


def logprob_errors(ours: Runner, expected: Runner, prompts: list[list[int]]) -> np.ndarray:
    """[prompts, vocabulary] of the log-probs after each prompt."""
    found = []
    for runner in (ours, expected):
        size = runner.config.vocab_size
        logprobs = np.zeros((len(prompts), size))
        for row, prompt in zip(logprobs, prompts, strict=True):
            sequence = Sequence(prompt)
            Driver(runner, top_n=size).generate([sequence], 1)
            for token, value in sequence.tops[0]:
                row[token] = value
        found.append(logprobs)
    return np.abs(found[0] - found[1])


class RoundedTorch(TorchBackend):
    """The reference with inputs of linears rounded as the kernels do."""

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return super().linear(eight_bits(x, torch.float32), weight)

    def linear_add(self, x: torch.Tensor, weight: Any, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.linear(x, weight)

    def logits(
        self, x: torch.Tensor, norm: Any, head: Any, batch: Any, soft_cap: float | None = None
    ) -> torch.Tensor:
        logits = self.linear(self.rms_norm(x[batch.logit_tokens], norm), head)
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def rounded_runner(make: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch) -> Runner:
    """What `make` makes, with the rounded reference for a backend."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "trunkline.engine.runner.select_backend",
            lambda device, dtype, *_, needs: RoundedTorch(device, dtype),
        )
        return make()


def assert_is_rounded_reference(ours: Runner, rounded: Runner, exact: Runner) -> None:
    """Equal to the rounded reference, and as near to the exact one as that is.

    Where sums differ in their last bits, a value may be rounded to the next step, and long prompts
    have many values: so equality is asked of most prompts of one token.
    """
    short = logprob_errors(ours, rounded, [[token] for token in range(40)]).max(-1)
    assert (short < 1e-4).mean() > 0.7, short
    prompts = [request.prompt for request in requests()]
    rounding = logprob_errors(rounded, exact, prompts)
    errors = logprob_errors(ours, exact, prompts)
    assert errors.mean() < 1.3 * rounding.mean(), (errors.mean(), rounding.mean())
    assert errors.max() < 2 * rounding.max(), (errors.max(), rounding.max())


@pytest.mark.parametrize("family", DENSE)
def test_int8_is_the_rounded_reference(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = memory_checkpoint(family)
    weights = {
        name: eight_bits(tensor, torch.float16) if tensor.ndim == 2 else tensor
        for name, tensor in checkpoint.weights.items()
    }
    stored = MemoryCheckpoint(checkpoint.config, weights)
    ours = tiny_runner(checkpoint, backend="cpu", computation=INT8)
    rounded = rounded_runner(lambda: tiny_runner(stored, backend="torch"), monkeypatch)
    assert_is_rounded_reference(ours, rounded, tiny_runner(stored, backend="torch"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_batch_chunks_or_threads(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = memory_checkpoint("llama")
    runs = []
    for threads in (1, 2, 3):
        monkeypatch.setenv(THREADS_VARIABLE, str(threads))
        runner = tiny_runner(
            checkpoint, backend="cpu", dtype=dtype, computation=INT8, num_pages=2000
        )
        runs.append(bits(generate(runner, requests(32), chunk=(None, 23, 1)[threads - 1])))
    alone = [bits(generate(runner, [request]))[0] for request in requests(32)]
    for run in runs:
        assert run == alone


@pytest.mark.parametrize("isa", ["avx512_bf16", "avx2", "portable"])
@pytest.mark.parametrize("quantization", ["int8", "gguf"])
def test_every_instruction_set(
    isa: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in cpu_isas():
        pytest.skip(f"not run: this processor does not have {isa}")
    monkeypatch.setenv(ISA_VARIABLE, isa)
    path = tmp_path / "tiny.gguf"
    TinyGguf(kind="Q4_1").write(path)
    runner = gguf_runner(path, quantization=quantization)
    assert runner.backend.isa == isa  # type: ignore[union-attr]
    together = bits(generate(runner, requests()))
    assert together == [bits(generate(runner, [r], chunk=7))[0] for r in requests()]


def gguf_runner(path: Path, quantization: str = "gguf", **changes: Any) -> Runner:
    options: dict[str, Any] = {
        "dtype": "float32",
        "backend": "cpu",
        "num_pages": 400,
        "max_running_requests": 40,
        "max_context_len": 512,
        "progress": False,
    }
    checkpoint = open_checkpoint(ModelOptions(model_path=str(path)))
    computation = BackendOptions(quantization=quantization)
    return Runner(checkpoint, RunnerOptions(**{**options, **changes}, computation=computation))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_blocks_are_the_dequantised_file_but_for_their_activations(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    TinyGguf(kind=kind, config={"tie_word_embeddings": tied}).write(path)
    ours = gguf_runner(path)

    def dequantised() -> Runner:
        return gguf_runner(path, quantization="none", backend="torch")

    rounded = rounded_runner(dequantised, monkeypatch)
    assert_is_rounded_reference(ours, rounded, dequantised())


def random_blocks(kind: str, num_rows: int, width: int) -> BlockTensor:
    """Random codes under scales of a usual size."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (num_rows, width // block, num_bytes), np.uint8)
    has_two = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    halves = generator.normal(0, 0.05, (*blocks.shape[:2], 2)).astype(np.float16)
    count = 2 if has_two else 1
    blocks[..., : 2 * count] = halves[..., :count].copy().view(np.uint8)
    return BlockTensor(kind, (num_rows, width), blocks.reshape(num_rows, -1))


@pytest.mark.parametrize("kind", cpu_block_kinds())
def test_every_kind_is_read_as_the_gguf_package_reads_it(kind: str) -> None:
    """Logits of a model without layers whose head is the identity: normed rows of the table."""
    width = 256
    table = random_blocks(kind, width, width)
    backend = select_backend(CPU, torch.float32, "cpu", BackendOptions(quantization="gguf"))
    assert isinstance(backend, ProgramBackend)
    embedding = backend.create_embedding(width, width)
    embedding.load("weight", table)
    norm = backend.create_norm(width, 0.0)
    norm.load("weight", torch.ones(width))
    head = backend.create_linear(LinearSpec(width, (LinearPart("head", width),)))
    head.load("head.weight", torch.eye(width))

    def forward(batch: Any) -> ForwardResult:
        x = backend.embed(embedding, batch)
        logits = backend.logits(x, norm, head, batch)
        return ForwardResult(x, logits, backend.pooled_states(x, norm, batch))

    program = backend.create_program(forward, SIZES)
    expected = gguf.dequantize(table.rows, gguf.GGMLQuantizationType[kind]).astype(np.float64)
    expected /= np.sqrt((expected**2).mean(-1, keepdims=True))
    tokens = list(range(24))
    sections = {
        "row_slot": tokens,
        "row_query_len": [1] * 24,
        "row_computed_len": [0] * 24,
        "row_token_source": [0] * 24,
        "token_ids": tokens,
        "positions": [0] * 24,
        "page_writes": [[0, slot, 0, slot + 1] for slot in tokens],
        "logit_tokens": tokens,
        "logit_flags": [0] * 24,
        "logit_top_n": [width] * 24,
        "score_offsets": [0] * 25,
        **opened_sections([Opened(slot, 1, Params()) for slot in tokens]),
    }
    plan = build_plan(1, sections)
    program.forward(plan)
    result = read_result(program.sample(plan).wait())
    found = np.zeros((24, width))
    ids = result["top_ids"].reshape(24, width)
    np.put_along_axis(found, ids, result["top_logprobs"].reshape(24, width), 1)
    logits = expected[:24]
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # Scales are float16, activations are rounded to 127 steps to each side.
    steps = np.abs(logits).reshape(24, -1, BLOCK).max(-1).repeat(BLOCK, -1) / 127
    assert (np.abs(found - wanted) < 0.6 * steps + 2e-3 + 1e-3 * np.abs(wanted)).all()


def test_blocks_with_several_kinds_in_one_linear() -> None:
    """Parts of a fused linear need not be stored alike; what has no packed form becomes int8."""
    width, kinds = 256, ("Q4_K", "Q8_0", "Q5_1")
    backend = select_backend(CPU, torch.float32, "cpu", BackendOptions(quantization="gguf"))
    parts = tuple(LinearPart(kind, 96) for kind in kinds)
    linear = backend.create_linear(LinearSpec(width, parts))
    for kind in kinds:
        linear.load(f"{kind}.weight", random_blocks(kind, 96, width))
    assert linear.num_bytes == 128 * width * (20 + 34 + 36) // 32
    linear.load("Q4_K.weight", torch.zeros(96, width))
    assert linear.num_bytes == 128 * width * (34 + 34 + 36) // 32


def test_memory_of_a_tied_table_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    TinyGguf(kind="Q4_0", config={"tie_word_embeddings": True}).write(path)
    packed, dense = (gguf_runner(path, quantization=q).memory for q in ("gguf", "none"))
    assert packed.weight_bytes < 0.3 * dense.weight_bytes


def test_weights_may_be_loaded_again() -> None:
    first, second = memory_checkpoint("llama-tied", seed=0), memory_checkpoint("llama-tied", seed=1)
    runner = tiny_runner(first, backend="cpu", computation=INT8)
    before = generate(runner, requests(4))
    for prefix, weight in runner.model.weights():
        for part in weight.shapes:
            weight.load(part, second.weights[prefix + part])
    after = generate(runner, requests(4))
    expected = generate(tiny_runner(second, backend="cpu", computation=INT8), requests(4))
    assert bits(after) == bits(expected)
    assert bits(after) != bits(before)


@pytest.mark.parametrize(
    ("requested", "kinds", "dtype", "backend", "expected"),
    [
        ("auto", {"Q4_1", "Q8_0"}, torch.bfloat16, None, "gguf"),
        ("auto", {"Q4_K", "Q6_K"}, torch.float32, None, "gguf"),
        ("auto", {"Q4_1", "F16"}, torch.bfloat16, None, "none"),
        ("auto", set(), torch.bfloat16, None, "none"),
        ("auto", {"Q4_1"}, torch.bfloat16, "torch", "none"),
        ("auto", {"Q4_1"}, torch.float16, None, "none"),
        ("gguf", {"Q4_1", "F16"}, torch.bfloat16, None, "gguf"),
        ("int8", set(), torch.bfloat16, None, "int8"),
        ("none", {"Q4_1"}, torch.bfloat16, None, "none"),
    ],
)
def test_which_arithmetic_a_model_gets(
    requested: str, kinds: set[str], dtype: torch.dtype, backend: str | None, expected: str
) -> None:
    stored = Stored(frozenset(kinds), LARGE_BYTES + 1)
    assert resolve_quantization(requested, stored, CPU, dtype, backend) == expected
    if requested == "auto":
        small = Stored(stored.kinds, LARGE_BYTES)
        assert resolve_quantization(requested, small, CPU, dtype, backend) == "none"


@pytest.mark.parametrize(
    ("requested", "kinds", "dtype", "message"),
    [
        ("gguf", set(), torch.bfloat16, "no GGUF file with quantised matrices; use 'int8'"),
        ("gguf", {"F16"}, torch.bfloat16, "no GGUF file with quantised matrices"),
        ("int8", set(), torch.float16, "'int8', which needs a CPU and dtype bfloat16 or float32"),
    ],
)
def test_arithmetic_that_a_model_cannot_have(
    requested: str, kinds: set[str], dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_quantization(requested, Stored(frozenset(kinds)), CPU, dtype)
