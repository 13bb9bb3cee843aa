"""The Gumbel noise of `docs/plan.md` on the device, and the exact arg-max over `scaled + noise`.

The noise of an id is float64 rounded to float32. Computing two float64 logarithms per id would cost
more than everything else, so `improve` first computes float32 approximations of all scores of a
block, whose distance from the exact scores is below `ERROR`. The exact winner's approximation then
lies within `2 * ERROR` of the block's largest, and only ids that near (nearly always one) get the
exact noise, one after another. The result is the arg-max of the exact float32 scores, the lowest id
among equals.

`ERROR`, for hardware logarithms with an absolute error of 2^-22 in (0.5, 2) and a relative error of
2^-22 elsewhere: with v = 1 - u, which is exact, the inner -ln u has a relative error below 2^-15.5
(worst just above v = 2^-6, below which a series takes over), so its logarithm is off by less than
2.2e-5; the outer logarithm adds at most 17.4 * 2^-22, the rounding of the sum at most 2^-19. The
noise takes 2^24 values: a test tries them all.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from trunkline.kernels.torch_reference.philox import GUMBEL_MAX

LARGEST_NOISE = tl.constexpr(GUMBEL_MAX)
ERROR = tl.constexpr(2.0**-13)
LEAST = tl.constexpr(-3.0e38)
MINUS_INFINITY = tl.constexpr(-math.inf)
NO_ID = tl.constexpr(2**31 - 1)
STEP = tl.constexpr(2.0**-24)
SERIES_BELOW = tl.constexpr(2.0**-6)


@triton.jit
def words_of_blocks(blocks, position, seed):
    """The four Philox words of every block of four consecutive ids.

    Args:
        blocks: int32 block, `id >> 2`.
        position: int32 scalar.
        seed: int64 scalar.
    """
    zero = blocks * 0
    return tl.philox(seed, blocks, zero + position, zero, zero)


@triton.jit
def words_of_ids(ids, position, seed):
    """Philox word of every id."""
    word_0, word_1, word_2, word_3 = words_of_blocks(ids >> 2, position, seed)
    lane = ids & 3
    low = tl.where(lane == 0, word_0, word_1)
    return tl.where(lane < 2, low, tl.where(lane == 2, word_2, word_3))


@triton.jit
def words_in_order(first_block, position, seed, NUM_BLOCKS: tl.constexpr):
    """Philox words of `4 * NUM_BLOCKS` consecutive ids, of which the first is a multiple of 4."""
    blocks = first_block + tl.arange(0, NUM_BLOCKS)
    word_0, word_1, word_2, word_3 = words_of_blocks(blocks, position, seed)
    return tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))


@triton.jit
def exact_noise(word):
    """`-ln(-ln u)` of a word, rounded to float32."""
    uniform = ((word >> 8).to(tl.float64) + 0.5) * STEP
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def near_noise(word):
    """The noise with an error below `ERROR`, without float64."""
    number = (word >> 8).to(tl.int32)
    value = number.to(tl.float32)
    in_low_half = number < 8388608
    # Each is exact in the half where it is used.
    uniform = (value + 0.5) * STEP
    complement = (16777216.0 - value - 0.5) * STEP
    logarithm = -tl.log(tl.where(in_low_half, uniform, 1.0 - complement))
    series = complement * (
        1.0 + complement * (0.5 + complement * (0.3333333333 + complement * 0.25))
    )
    use_series = (number >= 8388608) & (complement < SERIES_BELOW)
    return -tl.log(tl.where(use_series, series, logarithm))


@triton.jit
def improve(scaled, words, ids, kept, best_score, best_id):
    """The better of a result so far and the best of a block.

    Args:
        scaled: float32 block.
        words: Philox words of the ids.
        ids: int32 block.
        kept: which of them may be drawn.
        best_score: float32 scalar, -inf before the first block.
        best_id: int32 scalar.

    Returns:
        Exact score and id; the lowest id among equals.
    """
    near = tl.where(kept, scaled + near_noise(words), MINUS_INFINITY)
    top = tl.max(near, 0)
    # Above -inf, where nothing is left.
    least = tl.maximum(tl.maximum(top - 2 * ERROR, best_score - ERROR), LEAST)
    while top >= least:
        chosen = tl.min(tl.where(near == top, ids, NO_ID), 0)
        at = ids == chosen
        value = tl.max(tl.where(at, scaled, MINUS_INFINITY), 0)
        word = tl.max(tl.where(at, words.to(tl.int64), 0), 0)
        score = value + exact_noise(word)
        better = (score > best_score) | ((score == best_score) & (chosen < best_id))
        best_score = tl.where(better, score, best_score)
        best_id = tl.where(better, chosen, best_id)
        near = tl.where(at, MINUS_INFINITY, near)
        top = tl.max(near, 0)
    return best_score, best_id
