"""What the kernels share."""

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton.launch import (
    INTERPRETED,
    KNOWN_TRAITS,
    assume_device,
    ceil_div,
    check_fp8,
    device_traits,
    dot,
    narrow,
    next_power_of_2,
)


@triton.jit
def _narrow_kernel(x_pointer, out_pointer, N: tl.constexpr):
    places = tl.arange(0, N)
    x = tl.load(x_pointer + places)
    tl.store(out_pointer + places, narrow(x, out_pointer.dtype.element_ty))


@triton.jit
def _dot_kernel(a_pointer, b_pointer, out_pointer, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_pointer + places), tl.load(b_pointer + places)
    tl.store(out_pointer + places, dot(a, b, tl.full([N, N], 1.0, tl.float32)))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]
)
@pytest.mark.parametrize("size", [1e-4, 0.01, 1.0, 100.0])
def test_narrow_rounds_as_torch_does(guards: Guards, dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2048) * size).clamp(-448, 448)
    x[:8] = torch.tensor(
        [0.0, -0.0, 1.00390625, 1.01171875, 0.0009765625, 0.0029296875, 17.0, 19.0]
    )
    out = guards.empty((2048,), dtype)
    _narrow_kernel[(1,)](guards.full(x), out, N=2048)
    assert torch.equal(out.float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_keeps_what_is_not_finite(guards: Guards, dtype: torch.dtype) -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    out = guards.empty((4,), dtype)
    _narrow_kernel[(1,)](guards.full(x), out, N=4)
    assert torch.equal(out.float().nan_to_num(7.0), x.to(dtype).float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_dot_adds_the_product(guards: Guards, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (guards.full(torch.randn(16, 16).to(dtype)) for _ in range(2))
    out = guards.empty((16, 16), torch.float32)
    _dot_kernel[(1,)](a, b, out, N=16)
    expected = 1 + a.double() @ b.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_sizes() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_configurations_follow_an_assumed_device() -> None:
    assert INTERPRETED
    cpu = torch.device("cpu")
    assert device_traits(cpu) == KNOWN_TRAITS[80]
    with assume_device(KNOWN_TRAITS[100]):
        assert device_traits(cpu).capability == 100
        check_fp8(torch.device("cuda"))
    with (
        assume_device(KNOWN_TRAITS[80]),
        pytest.raises(ValueError, match=r"capability 8\.9, cuda has 8\.0; use another"),
    ):
        check_fp8(torch.device("cuda"))
    assert device_traits(cpu) == KNOWN_TRAITS[80]
