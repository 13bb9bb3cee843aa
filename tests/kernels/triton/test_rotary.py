"""Norm, rotary encoding and KV write against float32."""

import pytest
import torch
from tests.kernels.triton.guards import Guards
from tests.kernels.triton.kv_rows import EPSILON, PAGE_SIZE, Heads

from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.paged_layer import PagedLayer
from trunkline.kernels.triton.rotary import rotate_and_write

RMS_EPSILON = 1e-5
SCALES = (0.02, 0.4)  # some keys saturate, some values are subnormal


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def turned(x: torch.Tensor, weight: torch.Tensor | None, turn: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] in float32."""
    x = x.float()
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + RMS_EPSILON).rsqrt() * weight
    half = turn.shape[1] // 2
    cos, sin = turn[:, None, :half], turn[:, None, half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if dtype != FP8:
        return x.to(dtype)
    return (x * (1.0 / torch.tensor(scale))).clamp(-448, 448).to(FP8)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding: sums of squares are not taken in the same order."""
    epsilon = EPSILON.get(actual.dtype, 2**-3)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=epsilon, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_dtypes(guards: Guards, dtype: torch.dtype, fp8: bool, normed: bool) -> None:
    check(guards, Heads(9, 3, 64), dtype, FP8 if fp8 else dtype, normed, 0.75)


@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(2, 2, 80), Heads(3, 1, 256)])
@pytest.mark.parametrize("share", [0, 0.75, 1])
def test_shares_of_heads(guards: Guards, heads: Heads, share: float) -> None:
    check(guards, heads, torch.bfloat16, torch.bfloat16, True, share)


def check(
    guards: Guards,
    heads: Heads,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    normed: bool,
    share: float,
) -> None:
    """Three rows, a padding token; `share` of a head is turned."""
    dim = heads.head_dim
    positions = torch.tensor([0, 17, 40, 3, 15], dtype=torch.int32)
    slots = torch.tensor([1, 0, 1, -1, 2], dtype=torch.int32)
    tables = torch.tensor([[3, 1, 9], [7, 9, 2], [5, 9, 9]], dtype=torch.int32)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * dim
    qkv = guards.full((torch.randn(5, width) * 2).to(dtype))
    weights = [guards.full(torch.randn(dim)) if normed else None for _ in range(2)]
    cos_sin = guards.full(torch.randn(48, int(dim * share) // 2 * 2))
    shape = (10, PAGE_SIZE, heads.num_kv_heads, dim)
    key_pool, value_pool = guards.empty(shape, pool_dtype), guards.empty(shape, pool_dtype)
    query_out = guards.empty((5, heads.num_heads, dim), dtype)
    key_scale, value_scale = SCALES if pool_dtype == FP8 else (1.0, 1.0)
    layer = PagedLayer(
        keys=key_pool, values=value_pool, page_tables=guards.full(tables), scale=1.0,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip
    rotate_and_write(
        qkv, cos_sin, *weights, RMS_EPSILON, layer, guards.full(slots), guards.full(positions),
        query_out,
    )  # fmt: skip

    count = heads.num_heads + heads.num_kv_heads
    parts = qkv.view(5, -1, dim)
    turn = cos_sin[positions.long()]
    query = turned(parts[:, : heads.num_heads], weights[0], turn)
    key = turned(parts[:, heads.num_heads : count], weights[1], turn)
    written = torch.zeros(shape[:2], dtype=torch.bool)
    for token in (0, 1, 2, 4):
        position = int(positions[token])
        place = int(tables[slots[token], position // PAGE_SIZE]), position % PAGE_SIZE
        written[place] = True
        assert_near(query_out[token], query[token].to(dtype))
        assert_near(key_pool[place], stored(key[token], pool_dtype, key_scale))
        expected = stored(parts[token, count:].float(), pool_dtype, value_scale)
        assert torch.equal(value_pool[place].float(), expected.float())
    assert bool(query_out[3].isnan().all())
    for pool in (key_pool, value_pool):
        assert bool(pool.float()[~written].isnan().all())


def test_bits_of_fp8_are_those_of_torch(guards: Guards) -> None:
    numbers = torch.cat([
        torch.arange(256, dtype=torch.uint8).view(FP8).float(),
        torch.randn(512) * 100,
        torch.randn(512) * 2**-8,
        torch.tensor([448.0, 464.0, 465.0, 1e30, float("inf"), float("nan"), -0.0]).repeat(4),
    ])[: 4 * 256 + 256]  # fmt: skip
    grid = torch.arange(256, dtype=torch.uint8).view(FP8).float().sort().values
    middles = (grid[:-1] + grid[1:])[:254] / 2
    numbers = torch.cat([numbers, middles, torch.zeros(2)])
    tokens = numbers.numel() // 16
    qkv = guards.full(torch.cat([torch.zeros(tokens, 32), numbers[: tokens * 16].view(-1, 16)], 1))
    pools = [guards.empty((-(-tokens // 16), 16, 1, 16), FP8) for _ in range(2)]
    tables = torch.arange(len(pools[0]), dtype=torch.int32)[None]
    layer = PagedLayer(keys=pools[0], values=pools[1], page_tables=tables, scale=1.0)
    rotate_and_write(
        qkv, torch.zeros(tokens, 0), None, None, 0.0, layer,
        torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32),
        guards.empty((tokens, 1, 16), torch.float32),
    )  # fmt: skip
    found = pools[1].view(-1)[: tokens * 16].view(torch.uint8)
    expected = numbers[: tokens * 16].clamp(-448, 448).to(FP8).view(torch.uint8)
    nans = (expected & 0x7F) == 0x7F
    assert torch.equal(found[~nans], expected[~nans])
    assert bool(((found[nans] & 0x7F) == 0x7F).all())
