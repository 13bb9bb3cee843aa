"""The gate/up activation against torch."""

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.triton.guards import Guards
from tests.kernels.triton.test_norm import FLOATS, assert_close

from trunkline.kernels.specs import ActivationName
from trunkline.kernels.triton import activation as activation_module
from trunkline.kernels.triton.activation import gate_up
from trunkline.kernels.triton.launch import FP8


def expected_product(x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    gate, up = (half.double() for half in x.chunk(2, dim=-1))
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.to(x.dtype).double() * up


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 48, 1500])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaled", [False, True])
def test_gate_up(
    guards: Guards,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    dtype: torch.dtype,
    scaled: bool,
    activation: ActivationName,
) -> None:
    monkeypatch.setattr(activation_module, "SCALED_BLOCK", 512)
    torch.manual_seed(0)
    x = guards.full((torch.randn(4, 2 * width) * 4).to(dtype))
    x[2] = 0
    out = guards.empty((4, width), FP8 if scaled else dtype)
    scales = guards.empty((4,), torch.float32) if scaled else None
    gate_up(x, activation, out, scales=scales)
    # Both sides round what the gate becomes; where they do it differently, they differ by one step.
    steps = 2 if dtype != torch.float32 and not scaled else 1
    expected = expected_product(x, activation)
    if steps == 1:
        assert_close(out, expected, scales)
    else:
        step = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=1.6 * step, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of the interpreter
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_large_gates_do_not_overflow(guards: Guards, activation: ActivationName) -> None:
    x = guards.full(torch.tensor([[-1e4, 1e4, 2.0, 3.0]]))
    out = guards.empty((1, 2), torch.float32)
    gate_up(x, activation, out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 3e4]]), rtol=0, atol=1e-30)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="x must be twice as wide"):
        gate_up(torch.zeros(2, 8), "silu", torch.zeros(2, 8))
    with pytest.raises(ValueError, match="known: silu, gelu_tanh"):
        gate_up(torch.zeros(2, 8), "gelu", torch.zeros(2, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales go with"):
        gate_up(torch.zeros(2, 8), "silu", torch.zeros(2, 4), scales=torch.zeros(2))
