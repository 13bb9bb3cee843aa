"""RMS norms against float64."""

import pytest
import torch
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.norm import (
    MAX_WIDTH,
    PostNorm,
    add_normed,
    add_rms_norm,
    rms_norm,
)

EPSILON = 1e-5
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}


def expected_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


def assert_close(out: torch.Tensor, expected: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is None:
        tolerance = TOLERANCES[out.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 1e-2)
        return
    largest = expected.abs().amax(-1)
    torch.testing.assert_close(scales.double(), (largest / 448).clamp(1e-12), rtol=1e-5, atol=0)
    # Half a step of a 3-bit mantissa, or of the multiples of 2^-9 near zero.
    error = (out.double() * scales.double()[:, None] - expected).abs()
    assert bool((error <= expected.abs() * 2**-4 * 1.001 + largest[:, None] * 2**-18).all())


def make(guards: Guards, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return guards.full((torch.randn(rows, width) * 3).to(dtype))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("width", [1, 48, 576, 2048])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaled", [False, True])
def test_rms_norm(guards: Guards, width: int, dtype: torch.dtype, scaled: bool) -> None:
    x = make(guards, 5, width, dtype)
    x[3] = 0
    weight = guards.full(torch.randn(width))
    out = guards.empty((5, width), FP8 if scaled else dtype)
    scales = guards.empty((5,), torch.float32) if scaled else None
    rms_norm(x, weight, EPSILON, out, scales=scales)
    assert_close(out, expected_norm(x, weight), scales)


@pytest.mark.parametrize("width", [48, 576])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_add_rms_norm_is_an_addition_and_a_norm(
    guards: Guards, width: int, dtype: torch.dtype, residual_dtype: torch.dtype, scaled: bool
) -> None:
    x, residual = make(guards, 4, width, dtype), make(guards, 4, width, residual_dtype)
    weight = guards.full(torch.randn(width))
    total = (x.float() + residual.float()).to(residual_dtype)
    outs = [guards.empty((4, width), FP8 if scaled else dtype) for _ in range(2)]
    scales = [guards.empty((4,), torch.float32) if scaled else None for _ in range(2)]
    add_rms_norm(x, residual, weight, EPSILON, outs[0], scales=scales[0])
    assert torch.equal(residual, total)
    rms_norm(total, weight, EPSILON, outs[1], scales=scales[1])
    assert torch.equal(outs[0].float(), outs[1].float())
    assert_close(outs[0], expected_norm(total, weight), scales[0])


@pytest.mark.parametrize("width", [48, 576])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_added_may_be_normed(guards: Guards, width: int, dtype: torch.dtype) -> None:
    x = make(guards, 4, width, dtype)
    residuals = [make(guards, 4, width, torch.float32)]
    residuals.append(guards.full(residuals[0].clone()))
    weight = guards.full(torch.randn(width))
    post_norm = PostNorm(guards.full(torch.randn(width)), EPSILON)
    total = residuals[0].double() + expected_norm(x, post_norm.weight)
    out = guards.empty((4, width), dtype)
    add_rms_norm(x, residuals[0], weight, EPSILON, out, post_norm=post_norm)
    torch.testing.assert_close(residuals[0].double(), total, rtol=1e-6, atol=1e-6)
    assert_close(out, expected_norm(residuals[0], weight), None)
    add_normed(x, residuals[1], post_norm)
    assert torch.equal(residuals[0], residuals[1])


def test_only_the_wanted_rows(guards: Guards) -> None:
    x = make(guards, 6, 64, torch.float32)[:, :48]  # rows further apart than they are wide
    weight = guards.full(torch.randn(48))
    rows = guards.full(torch.tensor([4, 0, 4], dtype=torch.int32))
    out = guards.empty((3, 48), torch.bfloat16)
    rms_norm(x, weight, EPSILON, out, rows=rows)
    assert_close(out, expected_norm(x, weight)[[4, 0, 4]], None)


def test_the_output_may_be_the_input(guards: Guards) -> None:
    x, residual = make(guards, 3, 40, torch.bfloat16), make(guards, 3, 40, torch.float32)
    weight = guards.full(torch.randn(40))
    expected = expected_norm(x.float() + residual, weight)
    add_rms_norm(x, residual, weight, EPSILON, x)
    assert_close(x, expected, None)


def test_no_rows(guards: Guards) -> None:
    rms_norm(torch.empty(0, 8), torch.ones(8), EPSILON, torch.empty(0, 8))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="scales go with an out of"):
        rms_norm(x, weight, EPSILON, torch.empty(2, 8), scales=torch.empty(2))
    with pytest.raises(ValueError, match="scales go with an out of"):
        rms_norm(x, weight, EPSILON, torch.empty(2, 8, dtype=FP8))
    with pytest.raises(ValueError, match=f"at most {MAX_WIDTH}"):
        rms_norm(torch.zeros(1, 40000), weight, EPSILON, x)
    with pytest.raises(ValueError, match="x is 8 wide"):
        rms_norm(x, torch.ones(9), EPSILON, x)
    with pytest.raises(ValueError, match="rows of x and out"):
        rms_norm(torch.zeros(8, 2).t(), weight, EPSILON, x)
    with pytest.raises(ValueError, match="residual is"):
        add_rms_norm(x, torch.zeros(3, 8), weight, EPSILON, x)
    with pytest.raises(ValueError, match="its norm's weight 9"):
        add_normed(x, x, PostNorm(torch.ones(9), EPSILON))
    with pytest.raises(ValueError, match=f"at most {MAX_WIDTH}"):
        add_normed(torch.zeros(1, 40000), x, PostNorm(weight, EPSILON))
    with pytest.raises(ValueError, match="rows of x must be contiguous"):
        add_normed(torch.zeros(8, 2).t(), x, PostNorm(weight, EPSILON))
