"""Which ids top-k and top-p keep: exactly the reference's, however many are equal."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_sampler import tied_logits

from trunkline.kernels.torch_reference.sampler import cut_to_top
from trunkline.kernels.triton.launch import next_power_of_2
from trunkline.kernels.triton.threshold import LARGEST_KEY, as_number, cut, keys_of, masses_of

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid):RuntimeWarning")


@triton.jit
def _cut_kernel(
    rows, listed_ids, limits, masses, last_keys, last_ids, width, whole_masses,
    CHUNK: tl.constexpr, IS_LISTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    values = rows + row * width
    limit = tl.load(limits + row)
    source = (values, listed_ids, values, width, IS_LISTED, 0.0, 1.0, 0, LARGEST_KEY)
    none = tl.zeros((), tl.int64)
    whole = tl.load(whole_masses + row)
    top_p = tl.load(masses + row).to(tl.float64)
    last_key, last_id = cut(source, (none, none, none), limit, top_p, whole, width, CHUNK)
    tl.store(last_keys + row, last_key)
    tl.store(last_ids + row, last_id)


@triton.jit
def _mass_kernel(rows, masses, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(rows + row * width + at, mask=at < width, other=float("-inf"))
    high, low = masses_of(keys_of(x))
    tl.store(masses + row, as_number(tl.sum(high, 0), tl.sum(low, 0)))


def kept(rows: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, chunk: int) -> list[set[int]]:
    """Sets by the kernel, of rows whose best is 0."""
    num_rows, width = rows.shape
    limits = np.where((top_k <= 0) | (top_k > width), width, top_k).astype(np.int32)
    keys = torch.empty(num_rows, dtype=torch.int32)
    last_ids = torch.empty(num_rows, dtype=torch.int32)
    whole = torch.empty(num_rows, dtype=torch.float64)
    _mass_kernel[(num_rows,)](rows, whole, width, BLOCK=next_power_of_2(width))
    _cut_kernel[(num_rows,)](
        rows,
        torch.arange(width, dtype=torch.int32),
        torch.from_numpy(limits),
        torch.from_numpy(top_p),
        keys,
        last_ids,
        width,
        whole,
        CHUNK=chunk,
        IS_LISTED=chunk % 3 == 1,
    )
    distances = torch.where(rows == 0, 0.0, -rows).view(torch.int32)
    ids = torch.arange(width)
    inside = (distances < keys[:, None]) | (
        (distances == keys[:, None]) & (ids <= last_ids[:, None])
    )
    inside &= ~rows.isinf()
    return [set(row.nonzero()[:, 0].tolist()) for row in inside]


def check(rows: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, chunk: int = 64) -> None:
    expected = rows.clone()
    cut_to_top(expected, top_k, top_p)
    sets = [set((~row.isinf()).nonzero()[:, 0].tolist()) for row in expected]
    assert kept(rows, top_k, top_p, chunk) == sets


@pytest.mark.parametrize(("width", "top_k"), [(7, 0), (7, 5), (100, 1), (1500, 0), (1500, 1400)])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.999, 1.0])
def test_sets_of_logits_with_ties(width: int, top_k: int, top_p: float) -> None:
    rows = tied_logits(2, width, seed=top_k)
    rows -= rows.amax(-1, keepdim=True)
    rows[1, width // 2 :: 3] = -torch.inf
    rows[1] -= rows[1].max()
    check(rows, np.full(2, top_k, np.int32), np.full(2, top_p, np.float32), chunk=256)


LEVELS = st.sampled_from([0.0, -0.0, -1e-40, -1e-7, -0.5, -1.0, -1.0, -3.0, -60.0, -1e30, -np.inf])
ROWS = st.lists(LEVELS, min_size=1, max_size=20)
TOP_P = st.one_of(
    st.sampled_from([0.25, 0.5, 0.75, 1.0, 1 - 2.0**-24]),
    st.floats(2.0**-6, 1.0, width=32),
)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(0, 22), TOP_P, st.sampled_from([16, 32, 64]))
def test_sets_of_few_levels(row: list[float], top_k: int, top_p: float, chunk: int) -> None:
    rows = torch.tensor([[*row, 0.0]])
    check(rows, np.array([top_k], np.int32), np.array([top_p], np.float32), chunk)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(ROWS, st.integers(0, 22), TOP_P, st.sampled_from([16, 32, 64]))
def test_sets_of_few_levels_in_many_cases(
    row: list[float], top_k: int, top_p: float, chunk: int
) -> None:
    rows = torch.tensor([[*row, 0.0]])
    check(rows, np.array([top_k], np.int32), np.array([top_p], np.float32), chunk)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_sets_of_distinct_logits(seed: int) -> None:
    random = np.random.default_rng(seed)
    width = (50, 3000, 20_000)[seed % 3]
    rows = torch.from_numpy((random.normal(size=(4, width)) * 3).astype(np.float32))
    rows -= rows.amax(-1, keepdim=True)
    top_k = random.choice([0, 0, 3, 200, width // 2], 4).astype(np.int32)
    top_p = random.choice([0.2, 0.9, 0.99, 0.9999, 1 - 2.0**-24], 4).astype(np.float32)
    check(rows, top_k, top_p, chunk=4096)
