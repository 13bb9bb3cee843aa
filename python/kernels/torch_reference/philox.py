"""Philox4x32-10, and the Gumbel noise that it gives every (seed, position, token id).

Noise is a pure function of these three, so a draw never depends on the batch. Key = the seed's 64
bits (low word first), counter = (token_id >> 2, position, 0, 0), lane = token_id & 3.
"""

from __future__ import annotations

import math

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
ROUNDS = 10

# Bounds of the noise: u lies in [2^-25, 1 - 2^-25]. Both are rounded outwards.
GUMBEL_MIN = -math.log(25 * math.log(2.0)) - 1e-3
GUMBEL_MAX = 25 * math.log(2.0) + 1e-3


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Ten rounds of Philox4x32.

    Args:
        counter: four int64 tensors holding 32-bit words, of shapes that broadcast together.
        key: two such tensors.

    Returns:
        Four int64 tensors holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Products wrap as signed 64-bit numbers; shift and mask still give their two words.
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((product_1 >> 32) & WORD) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & WORD) ^ c3 ^ k1
        c1, c3 = product_1 & WORD, product_0 & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return [c0, c1, c2, c3]


def gumbel_blocks(block: torch.Tensor, position: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of four consecutive token ids each.

    Args:
        block: [n] int64, `token_id >> 2`.
        position: [n] int64, absolute position of the token to draw.
        seed: [n] int64, any bits.

    Returns:
        [n, 4] float32, in [GUMBEL_MIN, GUMBEL_MAX].
    """
    zero = torch.zeros_like(block)
    words = philox([block, position & WORD, zero, zero], [seed & WORD, (seed >> 32) & WORD])
    # In float64: (2^24 - 1) + 0.5 has no float32, and would round to u = 1, noise = infinity.
    uniform = (torch.stack(words, dim=-1) >> 8).double().add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_().float()
