"""What the kernels and their launchers share; knows no kernel.

Rules that every kernel follows:

* Values are converted to float32 right after the load: Triton's interpreter computes bfloat16 and
  fp8 on their bit patterns. Products go through `dot`, results through `narrow`.
* Numbers that change from step to step (tokens, rows) stand in `do_not_specialize`, so that they
  compile once.
* Offsets into pools, weights and logits are int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
UPCAST_DOT = tl.constexpr(INTERPRETED)

FP8 = torch.float8_e4m3fn
FP8_MAX = tl.constexpr(448.0)
FP8_LEAST_SCALE = tl.constexpr(1e-12)  # of a row of zeros


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What configurations are chosen by."""

    capability: int  # 80, 90, 100 ...: major * 10 + minor
    num_processors: int
    shared_memory: int  # bytes that one program may use


KNOWN_TRAITS = {
    80: DeviceTraits(capability=80, num_processors=108, shared_memory=163 * 1024),
    90: DeviceTraits(capability=90, num_processors=132, shared_memory=227 * 1024),
    100: DeviceTraits(capability=100, num_processors=148, shared_memory=227 * 1024),
}

_assumed: ContextVar[DeviceTraits | None] = ContextVar("assumed device traits", default=None)


@contextmanager
def assume_device(traits: DeviceTraits) -> Iterator[None]:
    """Let launchers choose configurations as on this device, for cross-compilation."""
    token = _assumed.set(traits)
    try:
        yield
    finally:
        _assumed.reset(token)


def device_traits(device: torch.device) -> DeviceTraits:
    """Traits of a device; on a CPU, where kernels are interpreted, those of the least one."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    return _measured_traits(device) if device.type == "cuda" else KNOWN_TRAITS[80]


@lru_cache
def _measured_traits(device: torch.device) -> DeviceTraits:
    major, minor = torch.cuda.get_device_capability(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return DeviceTraits(
        capability=major * 10 + minor,
        num_processors=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
    )


def check_fp8(device: torch.device) -> None:
    """Refuse a GPU that has no products of fp8.

    Raises:
        ValueError: its capability is below 8.9.
    """
    if device.type == "cuda" and (capability := device_traits(device).capability) < 89:
        raise ValueError(
            f"fp8 products need a GPU of capability 8.9, {device} has {capability / 10}; use "
            "another quantization"
        )


def ceil_div(value: int, divisor: int) -> int:
    """Quotient, rounded up."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """The least power of two that is not below `value`; 1 for 0."""
    return 1 << max(value - 1, 0).bit_length()


@triton.jit
def dot(a, b, accumulator):
    """`accumulator + a b` in float32; float32 operands are not shortened to tf32."""
    if UPCAST_DOT:
        # Not a product of BLAS: it sums a row differently by the row's place in the tile.
        wide = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        return accumulator + tl.sum(wide, axis=1)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 to nearest even; the interpreter's own conversions do not."""
    if UPCAST_DOT:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
        elif dtype == tl.float8e4nv:
            x = _on_fp8_grid(x)
    return x.to(dtype)


@triton.jit
def _on_fp8_grid(x):
    """Round to nearest even to 3 bits of mantissa, with e4m3's subnormals (multiples of 2^-9)."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    normal = rounded.to(tl.float32, bitcast=True)
    # Adding and subtracting 1.5 * 2^14 leaves multiples of 2^-9, rounded to nearest even.
    subnormal = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)


# A bound on a thread's registers that is none: without any, the assembler spills some where one
# more program then fits on a processor.
ALL_REGISTERS = 255
