"""Routing, grouped products and their combination against torch, in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.triton.guards import Guards

from trunkline.kernels.triton import moe, routing
from trunkline.kernels.triton.fp8 import quantize_weight
from trunkline.kernels.triton.launch import FP8
from trunkline.kernels.triton.moe import ExpertWeights, block_rows, mixture
from trunkline.kernels.triton.routing import MAX_EXPERTS, expert_order, route

HIDDEN, WIDTH, EXPERTS, TOP_K = 72, 40, 6, 3
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (6, 3), (8, 8), (128, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_route(
    guards: Guards, renormalise: bool, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    logits = guards.full((torch.randn(5, experts) * 4).to(dtype))
    chosen, shares = route(logits, top_k, renormalise)
    order = torch.argsort(logits.double(), dim=-1, descending=True, stable=True)
    assert torch.equal(chosen.long(), order[:, :top_k])
    expected = torch.softmax(logits.double(), -1).gather(1, order[:, :top_k])
    expected = expected / expected.sum(-1, keepdim=True) if renormalise else expected
    torch.testing.assert_close(shares.double(), expected, rtol=2e-6, atol=1e-7)


def test_among_equal_logits_the_lower_experts_are_chosen(guards: Guards) -> None:
    logits = guards.full(torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0], [0.0] * 5]))
    chosen, _ = route(logits, 4, True)
    assert chosen.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_logits_that_are_not_finite_choose_experts_that_exist(guards: Guards) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 5, [1.0, nan, 2.0, 3.0, 4.0], [-inf, 1.0, -inf, -inf, -inf], [0.0] * 5]
    chosen, shares = route(guards.full(torch.tensor(rows)), 3, True)
    assert bool(((chosen >= 0) & (chosen < 5)).all())
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert bool(shares[:2].isnan().all())
    assert shares[2:].tolist() == [[1.0, 0.0, 0.0], pytest.approx([1 / 3] * 3)]


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (50, 5, 2), (7, 40, 8)])
@pytest.mark.parametrize("block_m", [16, 64])
def test_expert_order(
    monkeypatch: pytest.MonkeyPatch, tokens: int, experts: int, top_k: int, block_m: int
) -> None:
    monkeypatch.setattr(routing, "PAIR_BLOCK", 32)
    monkeypatch.setattr(routing, "FILL_BLOCK", 16)
    chosen = torch.randint(0, experts, (tokens, top_k), dtype=torch.int32)
    order = expert_order(chosen, experts, block_m)
    found = order.pairs.view(-1, block_m)
    assert found.shape[0] == order.block_experts.shape[0]
    used = order.block_experts >= 0
    assert bool((found[~used] == order.num_pairs).all())
    assert used.tolist() == sorted(used.tolist(), reverse=True)
    for expert in range(experts):
        rows = found[order.block_experts == expert].flatten().tolist()
        mine = (chosen.flatten() == expert).nonzero().flatten().tolist()
        assert rows[: len(mine)] == mine
        assert set(rows[len(mine) :]) <= {order.num_pairs}
        assert len(rows) == -(-len(mine) // block_m) * block_m


def some_weights(guards: Guards, dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(
        guards.full((torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) * 0.2).to(dtype)),
        guards.full((torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2).to(dtype)),
    )


def expected_mixture(
    x: torch.Tensor, logits: torch.Tensor, weights: ExpertWeights, renormalise: bool
) -> torch.Tensor:
    chosen, shares = route(logits, TOP_K, renormalise)
    rows = []
    for token, (experts, parts) in enumerate(zip(chosen.tolist(), shares.double(), strict=True)):
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, part in zip(experts, parts, strict=True):
            gate, up = (x[token].double() @ weights.gate_up[expert].double().T).chunk(2)
            row += part * ((F.silu(gate) * up) @ weights.down[expert].double().T)
        rows.append(row)
    return torch.stack(rows)


def check_mixture(
    guards: Guards, dtype: torch.dtype, renormalise: bool, tokens: int, deterministic: bool
) -> None:
    weights = some_weights(guards, dtype)
    x = guards.full(torch.randn(tokens, HIDDEN).to(dtype))
    logits = guards.full(torch.randn(tokens, EXPERTS))
    residual = guards.full(torch.randn(tokens, HIDDEN))
    expected = residual.double() + expected_mixture(x, logits, weights, renormalise)
    mixture(
        x,
        logits,
        weights,
        residual,
        top_k=TOP_K,
        renormalise=renormalise,
        activation="silu",
        deterministic=deterministic,
    )
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5}[dtype]
    # A sum near zero has the errors of its terms, which are as large as other sums.
    atol = tolerance * max(1.0, float(expected.std()))
    torch.testing.assert_close(residual.double(), expected, rtol=tolerance, atol=atol)


def test_mixture_of_experts_with_gelu(guards: Guards) -> None:
    weights = some_weights(guards, torch.float32)
    x = guards.full(torch.randn(5, HIDDEN))
    order = expert_order(torch.tensor([[0], [2], [0], [1], [2]], dtype=torch.int32), EXPERTS, 16)
    out = guards.empty((5, WIDTH), torch.float32)
    moe.expert_gate_up(x, None, weights, order, "gelu_tanh", out)
    for token, expert in enumerate((0, 2, 0, 1, 2)):
        gate, up = (x[token].double() @ weights.gate_up[expert].double().T).chunk(2)
        expected = F.gelu(gate, approximate="tanh") * up
        torch.testing.assert_close(out[token].double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "renormalise", "tokens", "deterministic"),
    [
        (torch.bfloat16, True, 1, False),
        (torch.float16, False, 9, False),
        (torch.float32, True, 9, True),
    ],
)
def test_mixture(
    guards: Guards, dtype: torch.dtype, renormalise: bool, tokens: int, deterministic: bool
) -> None:
    check_mixture(guards, dtype, renormalise, tokens, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 90, 700])  # at 700 tiles have 128 rows where they may
def test_mixture_over_the_matrix(
    guards: Guards, dtype: torch.dtype, renormalise: bool, tokens: int, deterministic: bool
) -> None:
    check_mixture(guards, dtype, renormalise, tokens, deterministic)


def test_mixture_of_quantised_experts(guards: Guards) -> None:
    plain = some_weights(guards, torch.bfloat16)
    weights = ExpertWeights(
        guards.empty(tuple(plain.gate_up.shape), FP8),
        guards.empty(tuple(plain.down.shape), FP8),
        guards.empty((EXPERTS, 2 * WIDTH), torch.float32),
        guards.empty((EXPERTS, HIDDEN), torch.float32),
    )
    assert weights.gate_up_scales is not None
    assert weights.down_scales is not None
    for expert in range(EXPERTS):
        quantize_weight(
            plain.gate_up[expert], weights.gate_up[expert], weights.gate_up_scales[expert]
        )
        quantize_weight(plain.down[expert], weights.down[expert], weights.down_scales[expert])
    wide = replace(
        plain,
        gate_up=weights.gate_up.double() * weights.gate_up_scales.double()[..., None],
        down=weights.down.double() * weights.down_scales.double()[..., None],
    )
    x = guards.full(torch.randn(20, HIDDEN).bfloat16())
    logits = guards.full(torch.randn(20, EXPERTS))
    residual = guards.full(torch.zeros(20, HIDDEN))
    mixture(
        x,
        logits,
        weights,
        residual,
        top_k=TOP_K,
        renormalise=True,
        activation="silu",
        deterministic=False,
    )
    expected = expected_mixture(x, logits, wide, True)
    error = (residual.double() - expected).norm() / expected.norm()
    assert 1e-3 < error < 6e-2  # activations are rounded to 3 bits, twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_the_batch(guards: Guards, dtype: torch.dtype) -> None:
    weights = some_weights(guards, dtype)
    x, logits = torch.randn(70, HIDDEN).to(dtype), torch.randn(70, EXPERTS)

    def run(rows: slice) -> torch.Tensor:
        residual = guards.full(torch.zeros(x[rows].shape))
        mixture(
            guards.full(x[rows]),
            guards.full(logits[rows]),
            weights,
            residual,
            top_k=TOP_K,
            renormalise=True,
            activation="silu",
            deterministic=True,
        )
        return residual

    together = run(slice(0, 70))
    for rows in (slice(0, 1), slice(69, 70), slice(5, 40)):
        assert torch.equal(run(rows), together[rows])


def test_no_tokens(guards: Guards) -> None:
    mixture(
        torch.empty(0, HIDDEN),
        torch.empty(0, EXPERTS),
        some_weights(guards, torch.float32),
        torch.empty(0, HIDDEN),
        top_k=TOP_K,
        renormalise=True,
        activation="silu",
        deterministic=False,
    )


def test_tiles_follow_the_pairs_of_an_expert_unless_they_must_not() -> None:
    for pairs, rows in ((8, 16), (2048, 16), (8192, 64), (65536, 128)):
        assert block_rows(pairs, 128, torch.bfloat16, False) == rows
        assert block_rows(pairs, 128, torch.bfloat16, True) == moe.DETERMINISTIC_BLOCK_M
    assert block_rows(65536, 128, torch.float32, False) == 64


def test_what_does_not_fit_is_refused(guards: Guards) -> None:
    weights = some_weights(guards, torch.float32)
    with pytest.raises(ValueError, match=f"at most {MAX_EXPERTS}"):
        route(torch.zeros(1, 2000), 2, True)
    with pytest.raises(ValueError, match="top_k 4 of 3 experts"):
        route(torch.zeros(1, 3), 4, True)
    order = expert_order(torch.zeros((2, TOP_K), dtype=torch.int32), EXPERTS, 16)
    pairs = 2 * TOP_K
    out = torch.empty(pairs, WIDTH)
    with pytest.raises(ValueError, match="dtype and last dimension"):
        moe.expert_gate_up(torch.zeros(2, HIDDEN).bfloat16(), None, weights, order, "silu", out)
    with pytest.raises(ValueError, match="known: silu, gelu_tanh"):
        moe.expert_gate_up(torch.zeros(2, HIDDEN), None, weights, order, "relu", out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows for 6 pairs"):
        moe.expert_down(torch.zeros(5, WIDTH), None, weights, order, torch.empty(5, HIDDEN))
    with pytest.raises(ValueError, match="no tile of 32 rows"):
        moe.expert_down(
            torch.zeros(pairs, WIDTH),
            None,
            weights,
            replace(order, block_m=32),
            torch.empty(pairs, HIDDEN),
        )
    with pytest.raises(ValueError, match="do not fit"):
        moe.combine(torch.zeros(5, 8), torch.zeros(2, 3), None, torch.zeros(2, 8))
