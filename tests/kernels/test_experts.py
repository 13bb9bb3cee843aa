"""Experts on the reference backend, and which backend a model with experts gets."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.tiny import memory_checkpoint, tiny_runner

from trunkline.engine.resources import weight_bytes
from trunkline.kernels import ExpertsSpec, select_backend
from trunkline.kernels.tensor_weights import NormWeight
from trunkline.kernels.torch_reference.backend import TorchBackend
from trunkline.kernels.torch_reference.experts import ExpertsWeight, route

CPU = torch.device("cpu")


def make_spec(renormalise: bool = True) -> ExpertsSpec:
    return ExpertsSpec(
        hidden_size=40,
        width=24,
        num_experts=7,
        top_k=3,
        renormalise=renormalise,
        activation="silu",
    )


def make_layer(backend: TorchBackend, spec: ExpertsSpec) -> tuple[NormWeight, ExpertsWeight]:
    torch.manual_seed(0)
    norm, experts = backend.create_norm(spec.hidden_size, 1e-6), backend.create_experts(spec)
    norm.load("weight", torch.rand(spec.hidden_size) + 0.5)
    for part, shape in experts.shapes.items():
        experts.load(part, torch.randn(shape) * 0.3)
    return norm, experts


def plain(x: torch.Tensor, norm: NormWeight, spec: ExpertsSpec) -> torch.Tensor:
    """The same layer by the book, in float64: the weights are those of `make_layer`."""
    torch.manual_seed(0)
    torch.rand(spec.hidden_size)
    tensors = {part: (torch.randn(shape) * 0.3).double() for part, shape in spec.shapes.items()}
    wide = x.double()
    normed = F.rms_norm(wide, (spec.hidden_size,), norm.weight.double(), norm.epsilon)
    shares, chosen = torch.softmax(normed @ tensors["gate.weight"].T, -1).topk(spec.top_k)
    if spec.renormalise:
        shares = shares / shares.sum(-1, keepdim=True)
    rows = []
    for row, experts, parts in zip(normed, chosen.tolist(), shares, strict=True):
        total = torch.zeros_like(row)
        for expert, part in zip(experts, parts, strict=True):
            gate, up, down = (
                tensors[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            total += part * (down @ (F.silu(gate @ row) * (up @ row)))
        rows.append(total)
    return wide + torch.stack(rows)


@pytest.mark.parametrize("renormalise", [False, True])
def test_moe_is_the_weighted_sum_of_experts(renormalise: bool) -> None:
    spec = make_spec(renormalise)
    backend = TorchBackend(CPU, torch.float32)
    norm, experts = make_layer(backend, spec)
    x = torch.randn(33, spec.hidden_size)
    expected = plain(x, norm, spec)
    result = backend.moe(x.clone(), norm, experts)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    backend = TorchBackend(CPU, dtype)
    norm, experts = make_layer(backend, make_spec())
    x = torch.randn(400, 40)
    together = backend.moe(x.clone(), norm, experts)
    for start, count in ((0, 1), (399, 1), (17, 1), (5, 16), (100, 37), (1, 399)):
        part = backend.moe(x[start : start + count].clone(), norm, experts)
        assert torch.equal(part, together[start : start + count]), (start, count)


def test_among_equal_experts_the_lower_ones_are_chosen() -> None:
    chosen, shares = route(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0]]), make_spec())
    assert chosen.tolist() == [[1, 3, 5]]
    torch.testing.assert_close(shares, torch.full((1, 3), 1 / 3))


def test_parts_can_be_loaded_again_and_must_fit() -> None:
    backend = TorchBackend(CPU, torch.float32)
    spec = make_spec()
    norm, experts = make_layer(backend, spec)
    x = torch.randn(20, 40)
    before = backend.moe(x.clone(), norm, experts)
    for expert in range(spec.num_experts):
        experts.load(f"experts.{expert}.down_proj.weight", torch.zeros(40, 24))
    assert torch.equal(backend.moe(x.clone(), norm, experts), x)
    assert not torch.equal(before, x)
    with pytest.raises(ValueError, match=r"up_proj.weight has shape \(1, 1\)"):
        experts.load("experts.2.up_proj.weight", torch.zeros(1, 1))


def test_models_with_experts_get_a_backend_that_has_them(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = memory_checkpoint("qwen3-moe-mixed")
    with caplog.at_level(logging.INFO, "trunkline.kernels.registry"):
        runner = tiny_runner(checkpoint)
    assert runner.backend.name == "torch"
    assert "torch is used: cpu has no operation moe, which the model needs" in caplog.text
    with pytest.raises(ValueError, match=r"'cpu' has no operation moe.*use another one"):
        tiny_runner(checkpoint, backend="cpu")
    with pytest.raises(ValueError, match="have no experts"):
        select_backend(CPU, torch.float32, "cpu").create_experts(make_spec())


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen3-moe-mixed"])
def test_the_weights_take_what_is_reckoned_with(family: str) -> None:
    checkpoint = memory_checkpoint(family)
    held = tiny_runner(checkpoint, backend="torch").memory.weight_bytes
    assert held == pytest.approx(weight_bytes(checkpoint.config, 4), rel=0.02)
