"""Numbers in fp8 (e4m3) by their bits, for devices that cannot convert them and for exactness.

The bits are the same on every device: round to nearest even, above 448 saturated, NaN kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trunkline.kernels.triton.launch import FP8_MAX


@triton.jit
def encode_e4m3(x):
    """Bits (uint8) of float32 numbers."""
    limited = tl.minimum(tl.abs(x), FP8_MAX)
    bits = limited.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The last bit of 2^14 + x stands for 2^-9, the unit of subnormal numbers.
    subnormal = (limited + 16384.0).to(tl.uint32, bitcast=True) & 0x7FFFFF
    magnitude = tl.where(limited < 0.015625, subnormal, normal)
    magnitude = tl.where(x == x, magnitude, 0x7F)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (magnitude | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(bits):
    """The float32 numbers that bits (uint8) stand for."""
    wide = bits.to(tl.uint32)
    shifted = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    # The exponents' biases differ by 127 - 7; the product by 2^120 is exact, subnormals included.
    numbers = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers)
