"""Which backends there are and which one fits a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trunkline.kernels.interface import ProgramBackend, StepwiseBackend
from trunkline.kernels.torch_reference.backend import TorchBackend


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend; among those that support a device, the highest `priority` is taken."""

    name: str
    priority: int
    supports: Callable[[torch.device, torch.dtype], bool]
    create: Callable[[torch.device, torch.dtype], StepwiseBackend | ProgramBackend]


def _supports_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


def _create_cpu(device: torch.device, dtype: torch.dtype) -> ProgramBackend:
    # Only who uses the kernels needs the extension.
    from trunkline.kernels.cpu import CpuBackend

    return CpuBackend(device, dtype)


BACKENDS: tuple[BackendEntry, ...] = (
    BackendEntry(
        name="torch", priority=0, supports=lambda _device, _dtype: True, create=TorchBackend
    ),
    BackendEntry(name="cpu", priority=10, supports=_supports_cpu, create=_create_cpu),
)


def select_backend(
    device: torch.device, dtype: torch.dtype, name: str | None = None
) -> StepwiseBackend | ProgramBackend:
    """Create the best backend for a device and dtype, or the one called `name`.

    Raises:
        ValueError: there is no such backend, or it does not support them.
    """
    fitting = [
        entry
        for entry in BACKENDS
        if entry.supports(device, dtype) and (name is None or entry.name == name)
    ]
    if not fitting:
        known = ", ".join(entry.name for entry in BACKENDS)
        raise ValueError(
            f"no kernel backend {name or ''!r} for device {device} and {dtype}; known: {known}"
        )
    return max(fitting, key=lambda entry: entry.priority).create(device, dtype)
