"""Decode attention against float64."""

import dataclasses

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

from trunkline.kernels.triton.attention import _workspace
from trunkline.kernels.triton.attention_parts import workspace_elements
from trunkline.kernels.triton.decode_attention import choose_max_splits, decode_attention
from trunkline.kernels.triton.launch import FP8, KNOWN_TRAITS, assume_device
from trunkline.kernels.triton.paged_layer import PagedLayer

GROUPED = Heads(6, 2, 64)
LENGTHS = [300, 0, 1, 128, 17]
PLAIN = Options()
ALL = Options(window=70, soft_cap=2.0, sinks=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(
    guards: Guards,
    heads: Heads,
    options: Options,
    *,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    kv_lens: list[int] = LENGTHS,
    max_splits: int = 3,
) -> None:
    hidden = [max(0, length - (options.window or length)) for length in kv_lens]
    rows = make_rows(guards, heads, kv_lens, pool_dtype or dtype, options, hidden)
    shape = (len(kv_lens), heads.num_heads, heads.head_dim)
    query = guards.full(torch.randn(shape).to(dtype))
    out = guards.empty(shape, dtype)
    workspace = guards.empty((workspace_elements(*shape, max_splits),), torch.float32)
    decode_attention(
        query,
        rows.layer,
        rows.row_slot,
        rows.kv_lens,
        out,
        workspace,
        split_size=128,
        max_splits=max_splits,
    )
    for row, length in enumerate(kv_lens):
        if length == 0:
            assert bool((out[row] == 0).all())
            continue
        expected = attend(query[row : row + 1], length - 1, rows, row)
        assert_close(out[row : row + 1], expected, rows.values[row])


@pytest.mark.parametrize("max_splits", [1, 3])
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_options(guards: Guards, options: Options, max_splits: int) -> None:
    check(guards, GROUPED, options, max_splits=max_splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
def test_dtypes(guards: Guards, dtype: torch.dtype, fp8: bool) -> None:
    check(guards, GROUPED, ALL, dtype=dtype, pool_dtype=FP8 if fp8 else None, kv_lens=[150])


def test_fp8_where_the_device_converts(guards: Guards) -> None:
    with assume_device(KNOWN_TRAITS[90]):
        check(guards, GROUPED, PLAIN, dtype=torch.bfloat16, pool_dtype=FP8, kv_lens=[40])


@pytest.mark.parametrize(
    "heads", [Heads(1, 1, 16), Heads(3, 3, 80), Heads(4, 1, 96), Heads(2, 1, 256), Heads(71, 1, 64)]
)
def test_heads(guards: Guards, heads: Heads) -> None:
    check(guards, heads, ALL, kv_lens=[90, 33])


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dtype", "pool_dtype", "options"), MATRIX)
def test_matrix(
    guards: Guards, heads: Heads, dtype: torch.dtype, pool_dtype: torch.dtype, options: Options
) -> None:
    for max_splits in (1, 2, 8):
        check(
            guards, heads, options, dtype=dtype, pool_dtype=pool_dtype,
            kv_lens=[385, 128, 0], max_splits=max_splits,
        )  # fmt: skip


def test_a_large_score_of_a_late_key_does_not_overflow(guards: Guards) -> None:
    check(guards, GROUPED, dataclasses.replace(PLAIN, scale=400.0))


def test_what_does_not_fit_is_refused() -> None:
    def call(
        head_dim: int = 64,
        pool: torch.dtype = torch.bfloat16,
        split_size: int = 128,
        **scales: float,
    ) -> None:
        tensors = torch.zeros(2, 16, 1, head_dim, dtype=pool)
        ints = torch.zeros(1, dtype=torch.int32)
        query = torch.zeros(1, 1, head_dim, dtype=torch.bfloat16)
        layer = PagedLayer(
            keys=tensors, values=tensors, page_tables=ints.view(1, 1), scale=1.0, **scales
        )
        workspace = torch.zeros(1)
        decode_attention(
            query, layer, ints, ints, query, workspace, split_size=split_size, max_splits=2
        )

    with pytest.raises(ValueError, match="head_dim is 512, the Triton kernels take at most 256"):
        call(head_dim=512)
    with pytest.raises(ValueError, match=r"the KV pool is torch\.float16"):
        call(pool=torch.float16)
    with pytest.raises(ValueError, match=r"KV scales are 2\.0 and 1\.0"):
        call(key_scale=2.0)
    with pytest.raises(ValueError, match="split_size is 100"):
        call(split_size=100)
    with pytest.raises(ValueError, match=r"workspace is .* need float32 of 132"):
        call()


def test_few_rows_are_split_more() -> None:
    assert [choose_max_splits(rows, 8, 132) for rows in (1, 4, 64)] == [33, 8, 1]
    assert choose_max_splits(1, 1, 132) == 64


def test_only_several_splits_need_memory() -> None:
    query = torch.empty(5, 6, 64)
    assert _workspace(query, 1).numel() == 1
    assert _workspace(query, 2).numel() == workspace_elements(5, 6, 64, 2)
