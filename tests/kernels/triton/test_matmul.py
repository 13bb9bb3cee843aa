"""The deterministic linear: right, and with the same bits for every number and place of rows."""

import itertools

import pytest
import torch
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.matmul import fixed_matmul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 64, 64), (5, 96, 160), (70, 130, 72)]  # rows, columns, width
MORE_SHAPES = [(64, 64, 128), (129, 65, 33), (200, 40, 300), (3, 1, 1)]


def normal(guards: Guards, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return guards.full(torch.randn(shape).to(dtype))


def check_product(
    guards: Guards, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, residual: bool
) -> None:
    torch.manual_seed(0)
    rows, columns, width = shape
    x, weight = normal(guards, (rows, width), dtype), normal(guards, (columns, width), dtype)
    added = normal(guards, (columns,), dtype) if bias else None
    stream = normal(guards, (rows, columns), torch.float32) if residual else None
    expected = x.double() @ weight.double().T
    for term in (added, stream):
        expected = expected if term is None else expected + term.double()
    for out_dtype in {dtype, torch.float32}:
        out = guards.empty((rows, columns), out_dtype)
        fixed_matmul(x, weight, added, stream, out)
        tolerance = torch.finfo(out_dtype).eps if out_dtype != torch.float32 else 1e-5
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_product_with_bias_and_residual(
    guards: Guards, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check_product(guards, shape, dtype, bias=True, residual=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bias", "residual"), list(itertools.product((False, True), repeat=2)))
def test_product_over_the_matrix(
    guards: Guards, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, residual: bool
) -> None:
    check_product(guards, shape, dtype, bias, residual)


def test_fp8_with_scales(guards: Guards) -> None:
    torch.manual_seed(0)
    x, weight = normal(guards, (9, 200), FP8), normal(guards, (70, 200), FP8)
    x_scales, weight_scales = guards.full(torch.rand(9)), guards.full(torch.rand(70))
    bias = normal(guards, (70,), torch.bfloat16)
    out = guards.empty((9, 70), torch.float32)
    fixed_matmul(x, weight, bias, None, out, x_scales=x_scales, weight_scales=weight_scales)
    wide = (
        x.double() * x_scales.double()[:, None],
        weight.double() * weight_scales.double()[:, None],
    )
    torch.testing.assert_close(
        out.double(), wide[0] @ wide[1].T + bias.double(), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_other_rows(guards: Guards, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = normal(guards, (150, 96), dtype), normal(guards, (72, 96), dtype)
    bias = normal(guards, (72,), dtype)
    together = guards.empty((150, 72), torch.float32)
    fixed_matmul(x, weight, bias, None, together)
    for start, count in ((0, 1), (63, 1), (64, 2), (149, 1), (10, 64), (30, 65), (7, 130)):
        alone = guards.empty((count, 72), torch.float32)
        fixed_matmul(guards.full(x[start : start + count]), weight, bias, None, alone)
        assert torch.equal(alone, together[start : start + count]), (start, count)


def test_bits_do_not_depend_on_what_the_other_rows_hold(guards: Guards) -> None:
    torch.manual_seed(0)
    x, weight = normal(guards, (20, 64), torch.bfloat16), normal(guards, (64, 64), torch.bfloat16)
    outs = [guards.empty((20, 64), torch.bfloat16) for _ in range(2)]
    fixed_matmul(x, weight, None, None, outs[0])
    x[3] = float("nan")
    x[4:] *= 100
    fixed_matmul(x, weight, None, None, outs[1])
    assert torch.equal(outs[0][:3], outs[1][:3])
    assert bool(outs[1][3].isnan().all())


def test_the_residual_may_be_the_output(guards: Guards) -> None:
    torch.manual_seed(0)
    x, weight = normal(guards, (6, 64), torch.bfloat16), normal(guards, (80, 64), torch.bfloat16)
    residual = normal(guards, (6, 80), torch.float32)
    out = guards.empty((6, 80), torch.float32)
    fixed_matmul(x, weight, None, residual, out)
    fixed_matmul(x, weight, None, residual, residual)
    assert torch.equal(residual, out)


def test_rows_may_lie_apart(guards: Guards) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 100)[:, :64], torch.randn(40, 100)[:, 20:84]
    out = guards.empty((6, 40), torch.float32)
    fixed_matmul(x, weight, None, None, out)
    torch.testing.assert_close(out, x @ weight.T)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, out = torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="do not fit"):
        fixed_matmul(x, torch.zeros(4, 9), None, None, out)
    with pytest.raises(ValueError, match="must be the same"):
        fixed_matmul(x, weight.bfloat16(), None, None, out)
    with pytest.raises(ValueError, match="must be contiguous"):
        fixed_matmul(x, torch.zeros(8, 4).t(), None, None, out)
    with pytest.raises(ValueError, match="scales of x and weight"):
        fixed_matmul(x, weight, None, None, out, x_scales=torch.ones(2))
    with pytest.raises(ValueError, match="residual is"):
        fixed_matmul(x, weight, None, torch.zeros(1, 4), out)
