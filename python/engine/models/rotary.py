"""Inverse frequencies of the rotary position encodings; everything reduces to them and one factor.

Every variant is computed as its reference implementation does, in float32, so that angles agree.
"""

from __future__ import annotations

import math

import torch

from trunkline.engine.models.config import DecoderConfig, RopeConfig
from trunkline.kernels import RotarySpec


def rotary_spec(
    config: DecoderConfig, num_positions: int, rope: RopeConfig | None = None
) -> RotarySpec:
    """The rotary encoding of a decoder.

    Args:
        config: the architecture.
        num_positions: how many positions the tables must hold.
        rope: the variant; None: that of layers without a window.

    Raises:
        ValueError: the kind is unknown, or its numbers do not fit the head.
    """
    rope = rope or config.rope
    dim = rope.rotary_dim if rope.rotary_dim is not None else config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    periods = rope.theta**exponents
    if rope.kind == "default":
        return RotarySpec(1.0 / periods, 1.0, num_positions)
    if rope.kind == "linear":
        return RotarySpec(1.0 / periods / rope.factor, 1.0, num_positions)
    if rope.kind == "factors":
        factors = torch.tensor(rope.frequency_factors, dtype=torch.float32)
        if factors.numel() * 2 != dim:
            raise ValueError(f"rope has {factors.numel()} frequency factors, needs {dim // 2}")
        return RotarySpec(1.0 / (periods * factors), 1.0, num_positions)
    if rope.kind == "llama3":
        return RotarySpec(_llama3(1.0 / periods, rope), 1.0, num_positions)
    if rope.kind == "yarn":
        frequencies = _yarn(periods, rope, dim)
        return RotarySpec(frequencies, _yarn_factor(rope), num_positions)
    raise ValueError(f"rope kind {rope.kind!r} is not supported")


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    slowed = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * slowed / rope.factor + smooth * slowed
    return torch.where((wavelengths >= high) & (wavelengths <= low), between, slowed)


def _yarn(periods: torch.Tensor, rope: RopeConfig, dim: int) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn seldom slowed, with a linear ramp."""

    def dimension_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0
