"""Unified attention against float64, and its bits in any batch, chunk and step."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.kernels.triton.guards import Guards
from tests.kernels.triton.kv_rows import (
    MATRIX,
    Heads,
    Options,
    Rows,
    assert_close,
    attend,
    make_rows,
)

from trunkline.kernels.triton.launch import FP8, KNOWN_TRAITS, assume_device
from trunkline.kernels.triton.unified_attention import (
    SPLIT_SIZE,
    unified_attention,
    unified_workspace_elements,
)

GROUPED = Heads(6, 2, 64)
ROWS = [(200, 40), (0, 0), (1, 1), (90, 90), (33, 7)]  # kv length, queries
PLAIN = Options()
ALL = Options(window=70, soft_cap=2.0, sinks=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def run(
    guards: Guards,
    rows: Rows,
    queries: list[torch.Tensor],
    kv_lens: list[int],
    *,
    padding: int = 3,
    splits: int = 0,
) -> list[torch.Tensor]:
    """Results by row; `splits` > 0: with a workspace for so many."""
    counts = [len(query) for query in queries]
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    pad = torch.randn(padding, *queries[0].shape[1:]).to(queries[0].dtype)
    query = guards.full(torch.cat([*queries, pad]))
    out = guards.empty(tuple(query.shape), query.dtype)
    size = query.shape[0] * query.shape[1] * splits * (query.shape[2] + 2)
    unified_attention(
        query,
        rows.layer,
        rows.row_slot[: len(queries)],
        guards.full(torch.tensor(kv_lens, dtype=torch.int32)),
        guards.full(torch.tensor(starts, dtype=torch.int32)),
        out,
        guards.empty((max(1, size),), torch.float32),
        max_kv_len=splits * SPLIT_SIZE or None,
    )
    assert bool(out[starts[-1] :].isnan().all())
    return [out[first:last] for first, last in itertools.pairwise(starts)]


def check(
    guards: Guards,
    heads: Heads,
    options: Options,
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    splits: int = 0,
) -> None:
    kv_lens = [kv_len for kv_len, _ in lengths]
    window = options.window or max(kv_lens)
    hidden = [max(0, kv_len - count + 1 - window) for kv_len, count in lengths]
    rows = make_rows(guards, heads, kv_lens, pool_dtype or dtype, options, hidden)
    queries = [
        torch.randn(count, heads.num_heads, heads.head_dim).to(dtype) for _, count in lengths
    ]
    results = run(guards, rows, queries, kv_lens, splits=splits)
    for row, (kv_len, count) in enumerate(lengths):
        expected = attend(queries[row], kv_len - count, rows, row)
        assert_close(results[row], expected, rows.values[row])


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_options(guards: Guards, options: Options) -> None:
    check(guards, GROUPED, options, ROWS)


def test_splits_of_decode_rows(guards: Guards) -> None:
    check(guards, GROUPED, ALL, [(600, 1), (0, 0), (3, 1)], splits=3)
    check(guards, GROUPED, PLAIN, [(1100, 1), (512, 1)], splits=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
def test_dtypes(guards: Guards, dtype: torch.dtype, fp8: bool) -> None:
    pool_dtype = FP8 if fp8 else None
    check(guards, GROUPED, ALL, [(150, 50)], dtype=dtype, pool_dtype=pool_dtype)


def test_fp8_where_the_device_converts(guards: Guards) -> None:
    with assume_device(KNOWN_TRAITS[90]):
        check(guards, GROUPED, PLAIN, [(70, 30)], dtype=torch.bfloat16, pool_dtype=FP8)


@pytest.mark.parametrize(
    "heads", [Heads(1, 1, 16), Heads(3, 3, 80), Heads(4, 1, 96), Heads(2, 1, 256), Heads(71, 1, 64)]
)
def test_heads(guards: Guards, heads: Heads) -> None:
    check(guards, heads, ALL, [(90, 20), (33, 33)])


def product_in_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`a b`, every element summed in one order; what BLAS sums in depends on the row's place."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for column, row in zip(a.T, b, strict=True):
        total += column[:, None] * row[None, :]
    return total


@pytest.fixture
def _ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", product_in_order)


def chunks(length: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """First and end of chunks of the sizes in turn, from position 0 on."""
    first = 0
    while first < length:
        for size in sizes:
            end = min(first + size, length)
            if first < end:
                yield first, end
            first = end


def check_bits(
    guards: Guards,
    heads: Heads,
    options: Options,
    length: int,
    dtype: torch.dtype,
    pool: torch.dtype,
) -> None:
    """Whole, in chunks, beside other rows, as decode rows, and as decode rows in splits."""
    rows = make_rows(guards, heads, [length, 70], pool, options)
    query, other = (torch.randn(n, heads.num_heads, heads.head_dim).to(dtype) for n in (length, 70))
    (whole,) = run(guards, rows, [query], [length])
    for first, end in chunks(length, [1, 30, 7, 200]):
        (chunk,) = run(guards, rows, [query[first:end]], [end])
        assert torch.equal(chunk, whole[first:end])
    queries, kv_lens = [query[5:90], other[64:]], [90, 70]
    assert torch.equal(run(guards, rows, queries, kv_lens)[0], whole[5:90])
    num_splits = -(-length // SPLIT_SIZE) + 1
    for position in sorted(
        {0, 63, 64, 100, length - 1, length // 2, SPLIT_SIZE} & set(range(length))
    ):
        for splits, padding in ((0, 0), (num_splits, 2)):
            (single,) = run(
                guards, rows, [query[position : position + 1]], [position + 1],
                padding=padding, splits=splits,
            )  # fmt: skip
            assert torch.equal(single, whole[position : position + 1])


@pytest.mark.usefixtures("_ordered_products")
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_bits_depend_on_the_token_alone(guards: Guards, options: Options) -> None:
    check_bits(guards, Heads(3, 1, 32), options, 530, torch.bfloat16, torch.bfloat16)


# Heads in turn: each dtype of queries and pool with each of the options once.
BITS = [
    ([Heads(4, 1, 64), Heads(2, 2, 80)][index % 2], *combination)
    for index, combination in enumerate(
        itertools.product(
            (torch.bfloat16, torch.float16, torch.float32),
            (False, True),
            (PLAIN, ALL, Options(window=513)),
        )
    )
]


@pytest.mark.slow
@pytest.mark.usefixtures("_ordered_products")
@pytest.mark.parametrize(("heads", "dtype", "fp8", "options"), BITS)
def test_bits_in_the_matrix(
    guards: Guards, heads: Heads, dtype: torch.dtype, fp8: bool, options: Options
) -> None:
    check_bits(guards, heads, options, 1040, dtype, FP8 if fp8 else dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dtype", "pool_dtype", "options"), MATRIX)
def test_matrix(
    guards: Guards, heads: Heads, dtype: torch.dtype, pool_dtype: torch.dtype, options: Options
) -> None:
    for lengths, splits in (([(195, 90), (64, 64), (5, 2)], 0), ([(600, 1), (40, 1)], 2)):
        check(guards, heads, options, lengths, dtype=dtype, pool_dtype=pool_dtype, splits=splits)


def test_workspace_of_the_rows_that_gain_by_splits() -> None:
    assert unified_workspace_elements(32, 8, 128, 4096, 132) == 16 * 32 * 8 * 130
