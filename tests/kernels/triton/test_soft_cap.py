"""The soft cap of logits against float64."""

import pytest
import torch
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton.soft_cap import BLOCK, cap_softly


@pytest.mark.parametrize("width", [1, 199, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_against_float64(guards: Guards, width: int, cap: float) -> None:
    torch.manual_seed(0)
    logits = guards.full(torch.randn(3, width) * 20)
    expected = cap * torch.tanh(logits.double() / cap)
    cap_softly(logits, cap)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=cap * 1e-7)


def test_rows_further_apart_than_they_are_wide(guards: Guards) -> None:
    wide = guards.full(torch.full((2, 8), 5.0))
    cap_softly(wide[:, :5], 1.0)
    assert bool((wide[:, :5] < 1.01).all())
    assert bool((wide[:, 5:] == 5.0).all())


def test_what_is_not_finite(guards: Guards) -> None:
    logits = guards.full(torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e30]]))
    cap_softly(logits, 30.0)
    assert bool(logits[0, 0].isnan())
    assert logits[0, 1:].tolist() == [30.0, -30.0, 30.0]


def test_what_does_not_fit_is_refused() -> None:
    cap_softly(torch.zeros(0, 8), 1.0)
    with pytest.raises(ValueError, match="not float32 rows"):
        cap_softly(torch.zeros(2, 8).bfloat16(), 1.0)
    with pytest.raises(ValueError, match="not float32 rows"):
        cap_softly(torch.zeros(8, 2).t(), 1.0)
    with pytest.raises(ValueError, match=r"cap is 0\.0"):
        cap_softly(torch.zeros(2, 8), 0.0)
