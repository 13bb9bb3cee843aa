"""From settings to a backend and its options, and what is refused before a model is loaded."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from trunkline.engine import resources
from trunkline.engine.computation import Computation, computation
from trunkline.engine.config import KernelOptions
from trunkline.engine.quantization import Stored
from trunkline.engine.resources import GIB, SettingError
from trunkline.kernels import BackendOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chosen(
    device: torch.device,
    gib: int = 141,
    kinds: frozenset[str] = frozenset(),
    num_bytes: int = 2 * GIB,
    **settings: Any,
) -> Computation:
    stored = Stored(kinds, num_bytes)
    return computation(KernelOptions(**settings), device, torch.bfloat16, stored, gib * GIB)


def test_a_cpu_takes_the_best_backend() -> None:
    assert chosen(CPU) == Computation(None, BackendOptions())
    assert chosen(CPU, enable_deterministic_inference=True) == Computation(None, BackendOptions())
    assert chosen(CPU, attention_backend="torch_native").backend == "torch"


def test_a_cpu_packs_quantised_files_as_they_are() -> None:
    def quantization(*kinds: str, device: torch.device = CPU, **settings: Any) -> str:
        return chosen(device, kinds=frozenset(kinds), **settings).options.quantization

    assert quantization("Q4_1", "Q8_0") == "gguf"
    assert quantization("Q4_1", "F16") == quantization("BF16") == quantization() == "none"
    assert quantization("Q4_1", num_bytes=GIB) == "none"
    assert quantization("Q4_1", num_bytes=GIB, quantization="gguf") == "gguf"
    assert quantization("Q4_1", attention_backend="torch_native") == "none"
    assert quantization("Q4_1", quantization="none") == "none"
    assert quantization("Q4_1", quantization="int8") == quantization(quantization="int8") == "int8"
    assert quantization("Q4_1", device=CUDA) == "none"
    for kinds in ((), ("F16",)):
        with pytest.raises(SettingError, match="no GGUF file with quantised matrices"):
            quantization(*kinds, quantization="gguf")


def test_cuda_takes_triton() -> None:
    made = chosen(CUDA, kv_cache_dtype="fp8_e4m3", quantization="fp8")
    assert made.backend == "triton"
    assert made.options == BackendOptions(
        kv_dtype="fp8_e4m3", quantization="fp8", max_graph_batch=256
    )
    assert chosen(CUDA, attention_backend="torch_native").backend == "torch"
    assert chosen(CUDA, enable_deterministic_inference=True).options.deterministic


def test_rows_of_graphs() -> None:
    assert chosen(CUDA, gib=24).options.max_graph_batch == 160
    assert chosen(CUDA, cuda_graph_max_bs=32).options.max_graph_batch == 32
    assert chosen(CUDA, disable_cuda_graph=True, cuda_graph_max_bs=32).options.max_graph_batch == 0


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        (CPU, {"attention_backend": "triton"}, "attention_backend is 'triton', which needs a CUDA"),
        (CPU, {"attention_backend": "flashinfer"}, "the device is cpu; use 'auto'"),
        (CPU, {"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is 'fp8_e4m3'"),
        (CPU, {"quantization": "fp8"}, "quantization is 'fp8', which needs a CUDA device"),
        (CUDA, {"quantization": "int8"}, "quantization is 'int8', which needs a CPU"),
        (
            CPU,
            {"quantization": "int8", "attention_backend": "torch_native"},
            "backend 'torch'; use 'none'",
        ),
        (
            CUDA,
            {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch_native"},
            "which the reference backend",
        ),
        (
            CUDA,
            {"enable_deterministic_inference": True, "attention_backend": "flashinfer"},
            "use 'auto' or 'triton'",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    device: torch.device, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SettingError, match=message):
        chosen(device, **settings)


def test_memory_beside_weights_and_pool() -> None:
    """Logits of every row, twice, are most of what a step takes with many rows."""
    from tests.kernels.tiny import decoder_config

    config = decoder_config("llama", vocab_size=100_000)
    few, many = (resources.device_step_bytes(config, 2, 1024, rows, 32) for rows in (1, 1001))
    best_ids = 8 * 128 * 49  # of as many as are asked for, in each tile of 2048
    assert many - few == 1000 * (4 * (2 * 100_000 + 32) + 8 * 8192 + best_ids)
    small = replace(config, vocab_size=3000)
    few_ids, many_ids = (resources.device_step_bytes(small, 2, 1024, n, 32) for n in (1, 1001))
    assert many_ids - few_ids == 1000 * (4 * (2 * 3000 + 32) + 8 * 3000 + 8 * 128 * 2)
    assert few > resources.DEVICE_RUNTIME_BYTES
    half = resources.weight_bytes(config, 2, 1)
    assert resources.weight_bytes(config, 1) < half < resources.weight_bytes(config, 2)


def test_memory_of_experts() -> None:
    """Each token passes through several of them."""
    from tests.kernels.tiny import decoder_config

    config = decoder_config("qwen3-moe")
    experts = config.experts
    assert experts is not None
    few, many = (
        resources.device_step_bytes(
            replace(config, experts=replace(experts, top_k=top_k)), 2, 1024, 1, 32
        )
        for top_k in (100, 200)
    )
    assert many - few == 1024 * 100 * (2 * experts.intermediate_size + config.hidden_size) * 2
