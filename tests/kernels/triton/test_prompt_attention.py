"""Prompt attention against float64."""

import pytest
import torch
from tests.kernels.triton.guards import Guards
from tests.kernels.triton.kv_rows import (
    MATRIX,
    Heads,
    Options,
    assert_close,
    attend,
    make_rows,
)

from trunkline.kernels.triton.attention_parts import workspace_elements
from trunkline.kernels.triton.launch import FP8, KNOWN_TRAITS, assume_device
from trunkline.kernels.triton.prompt_attention import (
    CONFIGS,
    choose_block_rows,
    fitting_stages,
    prompt_attention,
)

GROUPED = Heads(6, 2, 64)
ROWS = [(200, 40), (0, 0), (1, 1), (90, 90), (33, 7)]  # kv length, queries
SHORT = [(300, 4), (129, 1), (0, 0)]
PLAIN = Options()
ALL = Options(window=70, soft_cap=2.0, sinks=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(
    guards: Guards,
    heads: Heads,
    options: Options,
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    max_splits: int = 1,
    padding: int = 3,
) -> None:
    kv_lens = [kv_len for kv_len, _ in lengths]
    window = options.window or max(kv_lens)
    hidden = [max(0, kv_len - count + 1 - window) for kv_len, count in lengths]
    rows = make_rows(guards, heads, kv_lens, pool_dtype or dtype, options, hidden)
    counts = torch.tensor([count for _, count in lengths])
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    shape = (int(query_start[-1]) + padding, heads.num_heads, heads.head_dim)
    query = guards.full(torch.randn(shape).to(dtype))
    out = guards.empty(shape, dtype)
    workspace = guards.empty((workspace_elements(*shape, max_splits),), torch.float32)
    prompt_attention(
        query,
        rows.layer,
        rows.row_slot,
        rows.kv_lens,
        guards.full(query_start.to(torch.int32)),
        out,
        workspace,
        max_query_len=int(counts.max()),
        split_size=128,
        max_splits=max_splits,
    )
    for row, (kv_len, count) in enumerate(lengths):
        tokens = slice(int(query_start[row]), int(query_start[row + 1]))
        expected = attend(query[tokens], kv_len - count, rows, row)
        assert_close(out[tokens], expected, rows.values[row])
    assert bool(out[int(query_start[-1]) :].isnan().all())


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("lengths", "max_splits"), [(ROWS, 1), (SHORT, 1), (SHORT, 3)], ids=["long", "short", "split"]
)
def test_options(
    guards: Guards, options: Options, lengths: list[tuple[int, int]], max_splits: int
) -> None:
    check(guards, GROUPED, options, lengths, max_splits=max_splits)


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


@pytest.mark.parametrize("window", [1, 63, 64, 65, 400])
def test_window_edges(guards: Guards, window: int) -> None:
    check(guards, Heads(2, 2, 32), Options(window=window), [(200, 140), (64, 64)])


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dtype", "pool_dtype", "options"), MATRIX)
def test_matrix(
    guards: Guards, heads: Heads, dtype: torch.dtype, pool_dtype: torch.dtype, options: Options
) -> None:
    for lengths, max_splits in (([(195, 90), (64, 64), (5, 2)], 1), ([(300, 3), (40, 2)], 4)):
        check(
            guards, heads, options, lengths, dtype=dtype, pool_dtype=pool_dtype,
            max_splits=max_splits,
        )  # fmt: skip


def test_blocks_follow_the_queries() -> None:
    assert [choose_block_rows(rows, 128, 2) for rows in (4, 20, 16000)] == [16, 64, 128]
    assert [choose_block_rows(16000, *sizes) for sizes in ((256, 2), (128, 4))] == [64, 16]
    config = CONFIGS[2, 128, 128]
    assert [fitting_stages(config, 128, 256, size * 1024) for size in (99, 163)] == [3, 5]
