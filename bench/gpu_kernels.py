"""The kernels of the CUDA backend one by one: right, and how close to the device's ceilings.

For `gpu_check.py`. References are plain torch in float32, written here once more so that nothing is
compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_timing import Ceilings, Finding, Report, seconds

from trunkline.kernels.triton.activation import gate_up
from trunkline.kernels.triton.attention_parts import workspace_elements
from trunkline.kernels.triton.decode_attention import choose_max_splits, decode_attention
from trunkline.kernels.triton.launch import device_traits
from trunkline.kernels.triton.matmul import fixed_matmul
from trunkline.kernels.triton.norm import add_rms_norm
from trunkline.kernels.triton.paged_layer import PagedLayer
from trunkline.kernels.triton.prompt_attention import prompt_attention
from trunkline.kernels.triton.rotary import rotate_and_write
from trunkline.kernels.triton.unified_attention import unified_attention

PAGE_SIZE = 16
SPLIT_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model's layer, and of the batches that kernels are tried with."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens: int  # of norms, activations, products
    rows: int  # of decode attention
    context: int  # keys of each
    prompt: int  # tokens of prompt attention


LARGE = Sizes(
    hidden=4096,
    inner=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tokens=8192,
    rows=16,
    context=4096,
    prompt=4096,
)
SMALL = Sizes(
    hidden=64,
    inner=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    tokens=3,
    rows=2,
    context=40,
    prompt=20,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A kernel, what it should give, and what its time is to be compared with.

    `num_bytes` are moved at least, or `operations` are done; `goal` is a share of that ceiling.
    """

    name: str
    run: Callable[[], torch.Tensor]
    expected: Callable[[], torch.Tensor]
    tolerance: float
    num_bytes: int = 0
    operations: int = 0
    goal: float | None = None


def check_kernels(
    report: Report, device: torch.device, dtype: torch.dtype, sizes: Sizes, ceilings: Ceilings
) -> None:
    """Run every check; goals count on a GPU only."""
    for check in (
        *_pointwise(device, dtype, sizes),
        *_products(device, dtype, sizes),
        *_attention(device, dtype, sizes),
    ):
        report.add(_correct(check))
        report.add(_speed(check, device, ceilings))


def _correct(check: Check) -> Finding:
    got, expected = check.run().float(), check.expected().float()
    error = float((got - expected).abs().max() / expected.abs().max())
    return Finding(
        name=f"{check.name}: correct",
        passed=error <= check.tolerance,
        value=f"largest error {error:.1e} of the largest value (bound {check.tolerance:.0e})",
        figures={"error": error},
    )


def _speed(check: Check, device: torch.device, ceilings: Ceilings) -> Finding:
    elapsed = seconds(check.run, device)
    ceiling = ceilings.bytes_per_s if check.num_bytes else ceilings.operations_per_s
    share = (check.num_bytes or check.operations) / elapsed / ceiling
    kind = "copy bandwidth" if check.num_bytes else "matrix rate"
    goal = check.goal if device.type == "cuda" else None
    asked = "" if goal is None else f", goal {goal:.0%}"
    return Finding(
        name=f"{check.name}: speed",
        passed=None if goal is None else share >= goal,
        value=f"{1e6 * elapsed:.0f} us, {share:.0%} of the {kind}{asked}",
        figures={"seconds": elapsed, "share": share},
    )


def _pointwise(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Check]:
    tokens, width = sizes.tokens, sizes.hidden
    delta = torch.randn((tokens, width), device=device).to(dtype)
    residual = torch.randn((tokens, width), device=device)
    weight = torch.randn(width, device=device)
    normed = torch.empty_like(delta)

    before = residual.clone()

    def norm() -> torch.Tensor:
        add_rms_norm(delta, residual, weight, 1e-5, normed)
        return normed

    def expected_norm() -> torch.Tensor:  # of the first run
        total = delta.float() + before
        return total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-5) * weight

    yield Check(
        name="add and rms norm",
        run=norm,
        expected=expected_norm,
        tolerance=1e-2,
        num_bytes=tokens * width * (2 * dtype.itemsize + 8),
        goal=0.85,
    )

    both = torch.randn((tokens, 2 * sizes.inner), device=device).to(dtype)
    gated = torch.empty((tokens, sizes.inner), dtype=dtype, device=device)

    def activation() -> torch.Tensor:
        gate_up(both, "silu", gated)
        return gated

    yield Check(
        name="gate and up",
        run=activation,
        expected=lambda: (
            torch.nn.functional.silu(both[:, : sizes.inner].float()) * both[:, sizes.inner :]
        ),
        tolerance=1e-2,
        num_bytes=3 * tokens * sizes.inner * dtype.itemsize,
        goal=0.85,
    )


def _products(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Check]:
    x = torch.randn((sizes.tokens, sizes.hidden), device=device).to(dtype)
    weight = torch.randn((sizes.inner, sizes.hidden), device=device).to(dtype)
    out = torch.empty((sizes.tokens, sizes.inner), dtype=dtype, device=device)

    def product() -> torch.Tensor:
        fixed_matmul(x, weight, None, None, out)
        return out

    yield Check(
        name="deterministic product",
        run=product,
        expected=lambda: x.float() @ weight.float().t(),
        tolerance=1e-2,
        operations=2 * sizes.tokens * sizes.hidden * sizes.inner,
    )


@dataclass(slots=True)
class _Rows:
    """Rows of equal length over pages that lie in random order."""

    layer: PagedLayer
    slots: torch.Tensor
    lens: torch.Tensor


def _rows(device: torch.device, dtype: torch.dtype, sizes: Sizes, count: int, keys: int) -> _Rows:
    pages = -(-keys // PAGE_SIZE)
    shape = (count * pages + 1, PAGE_SIZE, sizes.num_kv_heads, sizes.head_dim)
    order = torch.randperm(count * pages, device=device).to(torch.int32) + 1
    return _Rows(
        layer=PagedLayer(
            keys=torch.randn(shape, device=device).to(dtype),
            values=torch.randn(shape, device=device).to(dtype),
            page_tables=order.view(count, pages),
            scale=sizes.head_dim**-0.5,
        ),
        slots=torch.arange(count, dtype=torch.int32, device=device),
        lens=torch.full((count,), keys, dtype=torch.int32, device=device),
    )


def _expected_attention(
    query: torch.Tensor, rows: _Rows, queries: int, row: int, keys: int
) -> torch.Tensor:
    """Of one row; `query` is [queries, heads, head_dim]."""
    layer = rows.layer
    found = layer.page_tables[row].long()
    group = query.shape[1] // layer.num_kv_heads
    key, value = (
        pool[found].flatten(0, 1)[:keys].float().repeat_interleave(group, 1)
        for pool in (layer.keys, layer.values)
    )
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        attn_mask=torch.ones((queries, keys), dtype=torch.bool, device=query.device).tril(
            keys - queries
        ),
    )
    return attended.transpose(0, 1)


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Check]:
    heads, head_dim = sizes.num_heads, sizes.head_dim
    rows = _rows(device, dtype, sizes, sizes.rows, sizes.context)
    attended = (rows.layer, rows.slots, rows.lens)
    query = torch.randn((sizes.rows, heads, head_dim), device=device).to(dtype)
    out = torch.empty_like(query)
    splits = choose_max_splits(sizes.rows, sizes.num_kv_heads, device_traits(device).num_processors)
    workspace = torch.empty(workspace_elements(sizes.rows, heads, head_dim, splits), device=device)

    def decode() -> torch.Tensor:
        decode_attention(query, *attended, out, workspace, split_size=SPLIT_SIZE, max_splits=splits)
        return out

    def expected_decode() -> torch.Tensor:
        parts = [
            _expected_attention(query[row : row + 1], rows, 1, row, sizes.context)
            for row in range(sizes.rows)
        ]
        return torch.cat(parts)

    kv_bytes = 2 * sizes.context * sizes.num_kv_heads * head_dim * dtype.itemsize
    yield Check(
        name=f"decode attention, {sizes.rows} rows of {sizes.context}",
        run=decode,
        expected=expected_decode,
        tolerance=2e-2,
        num_bytes=sizes.rows * kv_bytes,
        goal=0.8,
    )
    yield from _prompt(device, dtype, sizes)


def _prompt(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Check]:
    rows = _rows(device, dtype, sizes, 1, sizes.prompt)
    attended = (rows.layer, rows.slots, rows.lens)
    query = torch.randn((sizes.prompt, sizes.num_heads, sizes.head_dim), device=device).to(dtype)
    starts = torch.tensor([0, sizes.prompt], dtype=torch.int32, device=device)
    # Query, key pairs of a causal prompt, twice: scores and outputs.
    operations = 2 * sizes.prompt**2 * sizes.num_heads * sizes.head_dim
    out = torch.empty_like(query)
    no_splits = torch.empty(1, device=device)

    def prompt() -> torch.Tensor:
        prompt_attention(query, *attended, starts, out, max_query_len=sizes.prompt)
        return out

    def unified() -> torch.Tensor:
        unified_attention(query, *attended, starts, out, no_splits)
        return out

    for name, run, goal in (
        ("prompt attention", prompt, 0.45),
        ("deterministic attention", unified, None),
    ):
        yield Check(
            name=f"{name}, {sizes.prompt} tokens",
            run=run,
            expected=lambda: _expected_attention(query, rows, sizes.prompt, 0, sizes.prompt),
            tolerance=2e-2,
            operations=operations,
            goal=goal,
        )
    yield _rotary(device, dtype, sizes)


def _rotary(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Check:
    """Rotary encoding with the KV write; checked by the keys that the pages hold."""
    tokens, heads, kv_heads = sizes.prompt, sizes.num_heads, sizes.num_kv_heads
    rows = _rows(device, dtype, sizes, 1, tokens)
    width = (heads + 2 * kv_heads) * sizes.head_dim
    qkv = torch.randn((tokens, width), device=device).to(dtype)
    angles = torch.rand((tokens, sizes.head_dim // 2), device=device) * 6
    turns = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    slots = torch.zeros(tokens, dtype=torch.int32, device=device)
    query = torch.empty((tokens, heads, sizes.head_dim), dtype=dtype, device=device)

    def rotate() -> torch.Tensor:
        rotate_and_write(qkv, turns, None, None, 0.0, rows.layer, slots, positions, query)
        return rows.layer.keys[rows.layer.page_tables[0].long()].flatten(0, 1)[:tokens]

    def expected() -> torch.Tensor:
        start = heads * sizes.head_dim
        key = qkv[:, start : start + kv_heads * sizes.head_dim].float()
        first, second = key.view(tokens, kv_heads, sizes.head_dim).chunk(2, -1)
        cos, sin = (turn[:, None] for turn in turns.chunk(2, 1))
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return Check(
        name="rotary and KV write",
        run=rotate,
        expected=expected,
        tolerance=1e-2,
        # The keys are read once more to be compared.
        num_bytes=2 * qkv.nbytes + 2 * tokens * kv_heads * sizes.head_dim * dtype.itemsize,
    )
