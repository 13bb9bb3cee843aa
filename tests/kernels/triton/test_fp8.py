"""Quantised rows, weights and their product."""

import pytest
import torch
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton import fp8
from trunkline.kernels.triton.fp8 import quantize_rows, quantize_weight, scaled_linear
from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.matmul import fixed_matmul


def expected_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scales = (wide.abs().amax(-1) / 448).clamp(1e-12)
    return (wide / scales[:, None]).clamp(-448, 448).to(FP8), scales


def some_rows(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    torch.manual_seed(0)
    rows = torch.randn(shape) * 10.0 ** torch.linspace(-3, 3, shape[0])[:, None]
    rows[1] = 0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 80, 1500])
def test_rows(
    guards: Guards, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int
) -> None:
    monkeypatch.setattr(fp8, "BLOCK", 512)
    x = guards.full(some_rows((5, width), dtype))
    out, scales = guards.empty((5, width), FP8), guards.empty((5,), torch.float32)
    quantize_rows(x, out, scales)
    expected, expected_scales = expected_rows(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(out.float(), expected.float())


def test_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "QUANTIZED_ROWS", 3)
    weight = some_rows((7, 64), torch.bfloat16)
    out, scales = torch.empty((7, 64), dtype=FP8), torch.empty(7)
    quantize_weight(weight, out, scales)
    expected, expected_scales = expected_rows(weight)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(out.float(), expected.float())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_the_two_linears_agree(guards: Guards, biased: bool, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, x_scales = expected_rows(torch.randn(rows, 96)) if rows else (torch.empty(0, 96), None)
    if x_scales is None:
        x, x_scales = x.to(FP8), torch.empty(0)
    weight, weight_scales = expected_rows(torch.randn(48, 96))
    bias = torch.randn(48).to(dtype) if biased else None
    out = guards.empty((rows, 48), dtype)
    fixed_matmul(x, weight, bias, None, out, x_scales=x_scales, weight_scales=weight_scales)
    scaled = scaled_linear(x, x_scales, weight, weight_scales, bias, dtype)
    assert scaled.dtype == dtype
    wide = (x.double() * x_scales.double()[:, None]) @ (
        weight.double() * weight_scales.double()[:, None]
    ).T
    expected = wide if bias is None else wide + bias.double()
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for result in (out, scaled):
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 24)
    with pytest.raises(ValueError, match="one scale per row"):
        quantize_rows(x, torch.zeros(2, 24), torch.zeros(2))
    with pytest.raises(ValueError, match="multiples of 16"):
        scaled_linear(
            x.to(FP8), torch.ones(2), torch.zeros(16, 24).to(FP8), torch.ones(16), None, x.dtype
        )
    with pytest.raises(ValueError, match="does not fit out"):
        quantize_weight(x, torch.zeros(3, 24, dtype=FP8), torch.zeros(3))
