"""Rows of keys and values in pages between NaN, and attention over them in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.paged_layer import PagedLayer

PAGE_SIZE = 16
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What attention does besides the plain thing."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float = 0.3


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows with their pages; what no row owns is NaN, and so is what a window hides."""

    layer: PagedLayer
    row_slot: torch.Tensor
    kv_lens: torch.Tensor
    keys: list[torch.Tensor]  # [kv_len, Hkv, D] float64 by row, scale included
    values: list[torch.Tensor]


# Heads, dtypes of queries and pools, options: what every attention kernel is run with.
MATRIX = [
    (heads, dtype, FP8 if fp8 else dtype, Options(window=window, soft_cap=soft_cap, sinks=sinks))
    for heads, dtype, fp8, window, soft_cap, sinks in itertools.product(
        (Heads(8, 1, 64), Heads(6, 2, 96)),
        (torch.bfloat16, torch.float16, torch.float32),
        (False, True),
        (None, 1, 129),
        (None, 5.0),
        (False, True),
    )
]


def make_rows(
    guards: Guards,
    heads: Heads,
    kv_lens: list[int],
    dtype: torch.dtype,
    options: Options,
    hidden: list[int] | None = None,
) -> Rows:
    """Fill pools of a dtype (of fp8 with scales) with random rows.

    Args:
        guards: around every tensor.
        heads: sizes.
        kv_lens: of each row.
        dtype: of the pools.
        options: of the layer.
        hidden: leading keys of each row that nothing may read.
    """
    num_pages = [-(-length // PAGE_SIZE) for length in kv_lens]
    count = sum(num_pages) + 3  # page 0, and two that no row owns
    shape = (count, PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    pools = [guards.empty(shape, dtype) for _ in range(2)]
    order = torch.randperm(sum(num_pages)) + 1
    tables = torch.full((len(kv_lens) + 1, max(num_pages) + 2), count - 1, dtype=torch.int32)
    slots = torch.randperm(len(kv_lens) + 1)[: len(kv_lens)].to(torch.int32)
    scales = (0.75, 1.5) if dtype == FP8 else (1.0, 1.0)
    contents: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for row, length in enumerate(kv_lens):
        pages = order[sum(num_pages[:row]) :][: num_pages[row]]
        tables[slots[row], : len(pages)] = pages
        positions = torch.arange(length)
        visible = positions >= (hidden[row] if hidden else 0)
        place = (pages[positions // PAGE_SIZE][visible], (positions % PAGE_SIZE)[visible])
        for pool, scale, content in zip(pools, scales, contents, strict=True):
            x = torch.randn(length, heads.num_kv_heads, heads.head_dim).to(dtype)
            # Assignment by index is not implemented for fp8.
            _bits(pool)[place] = _bits(x)[visible]
            content.append(x.double() * scale)
    layer = PagedLayer(
        keys=pools[0],
        values=pools[1],
        page_tables=guards.full(tables),
        scale=options.scale,
        window=options.window,
        soft_cap=options.soft_cap,
        sinks=guards.full(torch.randn(heads.num_heads) * 2) if options.sinks else None,
        key_scale=scales[0],
        value_scale=scales[1],
    )
    lens = guards.full(torch.tensor(kv_lens, dtype=torch.int32))
    return Rows(layer, guards.full(slots), lens, *contents)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == FP8 else x


def attend(query: torch.Tensor, first_position: int, rows: Rows, row: int) -> torch.Tensor:
    """Causal attention in float64 of consecutive queries [n, Hq, D] of one row."""
    layer = rows.layer
    group = query.shape[1] // layer.num_kv_heads
    keys = rows.keys[row].double().repeat_interleave(group, 1)
    values = rows.values[row].double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    positions = first_position + torch.arange(query.shape[0])[:, None]
    columns = torch.arange(keys.shape[0])[None, :]
    seen = columns <= positions
    if layer.window is not None:
        seen &= columns > positions - layer.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if layer.sinks is not None:
        column = layer.sinks.double()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values)


def assert_close(out: torch.Tensor, expected: torch.Tensor, values: torch.Tensor) -> None:
    """Equal up to the rounding of weights and results to the dtype of `out`.

    A weight is off by half an epsilon of itself, and the weights' sum is 1: the mean of `values` is
    off by half an epsilon of the largest, however small it is itself.
    """
    epsilon = EPSILON[out.dtype]
    largest = float(values.abs().max()) if values.numel() else 0.0
    torch.testing.assert_close(out.double(), expected, rtol=2 * epsilon, atol=epsilon / 2 * largest)
