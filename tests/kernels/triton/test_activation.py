"""The gate/up activation against torch."""

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.triton.guards import Guards
from tests.kernels.triton.test_norm import FLOATS, assert_close

from trunkline.kernels.triton import activation
from trunkline.kernels.triton.activation import gate_up
from trunkline.kernels.triton.launch import FP8


def expected_product(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).to(x.dtype).double() * up.double()


@pytest.mark.parametrize("width", [1, 48, 1500])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaled", [False, True])
def test_gate_up(
    guards: Guards,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    dtype: torch.dtype,
    scaled: bool,
) -> None:
    monkeypatch.setattr(activation, "SCALED_BLOCK", 512)
    torch.manual_seed(0)
    x = guards.full((torch.randn(4, 2 * width) * 4).to(dtype))
    x[2] = 0
    out = guards.empty((4, width), FP8 if scaled else dtype)
    scales = guards.empty((4,), torch.float32) if scaled else None
    gate_up(x, "silu", out, scales=scales)
    # Both sides round silu; where they round it differently, they differ by one step.
    steps = 2 if dtype != torch.float32 and not scaled else 1
    expected = expected_product(x)
    if steps == 1:
        assert_close(out, expected, scales)
    else:
        step = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=1.6 * step, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of the interpreter
def test_large_gates_do_not_overflow(guards: Guards) -> None:
    x = guards.full(torch.tensor([[-1e4, 1e4, 2.0, 3.0]]))
    out = guards.empty((1, 2), torch.float32)
    gate_up(x, "silu", out)
    assert out.tolist() == [[0.0, 3e4]]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="x must be twice as wide"):
        gate_up(torch.zeros(2, 8), "silu", torch.zeros(2, 8))
    with pytest.raises(ValueError, match="known: 'silu'"):
        gate_up(torch.zeros(2, 8), "gelu", torch.zeros(2, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales go with"):
        gate_up(torch.zeros(2, 8), "silu", torch.zeros(2, 4), scales=torch.zeros(2))
