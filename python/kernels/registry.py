"""Which backends there are and which one fits a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from trunkline.kernels.interface import BackendOptions, OptionError, ProgramBackend, StepwiseBackend
from trunkline.kernels.torch_reference.backend import TorchBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend; among those that support a device, the highest `priority` is taken.

    `lacks` names the operations of the vocabulary that it does not have.
    """

    name: str
    priority: int
    supports: Callable[[torch.device, torch.dtype], bool]
    create: Callable[[torch.device, torch.dtype, BackendOptions], StepwiseBackend | ProgramBackend]
    quantizations: tuple[str, ...] = ("none",)  # that it has; `engine.quantization` says what
    lacks: frozenset[str] = frozenset()


def _supports_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


def _create_cpu(
    device: torch.device, dtype: torch.dtype, options: BackendOptions
) -> ProgramBackend:
    # Only who uses the kernels needs the extension.
    from trunkline.kernels.cpu import CpuBackend

    _refuse_device_options("cpu", options)
    return CpuBackend(device, dtype, options.quantization)


def _create_torch(
    device: torch.device, dtype: torch.dtype, options: BackendOptions
) -> StepwiseBackend:
    _refuse_device_options("torch", options)
    return TorchBackend(device, dtype)


def _refuse_device_options(name: str, options: BackendOptions) -> None:
    """Refuse what only the CUDA backend has; both others are deterministic anyway."""
    for flag, value, neutral in (
        ("attention_backend", options.attention, "auto"),
        ("kv_cache_dtype", options.kv_dtype, "auto"),
    ):
        if value != neutral:
            raise OptionError(
                f"{flag} {value} is for CUDA devices; the {name} backend takes {neutral}"
            )


def _supports_cuda(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in TRITON_DTYPES and find_spec("triton") is not None


def _supports_interpreter(device: torch.device, dtype: torch.dtype) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cpu" and interpreted and dtype in TRITON_DTYPES


def _create_triton(
    device: torch.device, dtype: torch.dtype, options: BackendOptions
) -> ProgramBackend:
    # Only who uses the kernels needs Triton.
    from trunkline.kernels.triton.backend import TritonBackend

    return TritonBackend(device, dtype, options)


TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_QUANTIZATIONS = ("none", "fp8")


BACKENDS: tuple[BackendEntry, ...] = (
    BackendEntry(
        name="torch", priority=0, supports=lambda _device, _dtype: True, create=_create_torch
    ),
    BackendEntry(
        name="cpu",
        priority=10,
        supports=_supports_cpu,
        create=_create_cpu,
        quantizations=("none", "int8", "gguf"),
        lacks=frozenset({"moe"}),
    ),
    BackendEntry(
        name="triton",
        priority=20,
        supports=_supports_cuda,
        create=_create_triton,
        quantizations=TRITON_QUANTIZATIONS,
    ),
    # Kernels run in an interpreter there, for tests: below the reference, so by name only.
    BackendEntry(
        name="triton",
        priority=-1,
        supports=_supports_interpreter,
        create=_create_triton,
        quantizations=TRITON_QUANTIZATIONS,
    ),
)


def _fitting(
    device: torch.device, dtype: torch.dtype, name: str | None, quantization: str
) -> list[BackendEntry]:
    return [
        entry
        for entry in BACKENDS
        if entry.supports(device, dtype)
        and (name is None or entry.name == name)
        and quantization in entry.quantizations
    ]


def is_supported(
    device: torch.device, dtype: torch.dtype, name: str | None, quantization: str
) -> bool:
    """Whether `select_backend` finds one."""
    return bool(_fitting(device, dtype, name, quantization))


def select_backend(
    device: torch.device,
    dtype: torch.dtype,
    name: str | None = None,
    options: BackendOptions = BackendOptions(),  # noqa: B008 (it is frozen)
    *,
    needs: frozenset[str] = frozenset(),
) -> StepwiseBackend | ProgramBackend:
    """Create the best backend for a device and dtype, or the one called `name`.

    Args:
        device: where to compute.
        dtype: of weights and activations.
        name: of a backend; None: the best.
        options: what it is asked for; only a backend that has the quantization is taken.
        needs: operations that the model cannot do without, of those that a backend may lack.

    Raises:
        OptionError: the backend lacks what an option asks for.
        ValueError: there is no such backend, or it does not support device and dtype.
    """
    fitting = _fitting(device, dtype, name, options.quantization)
    if not fitting:
        known = ", ".join(dict.fromkeys(entry.name for entry in BACKENDS))
        raise ValueError(
            f"no kernel backend {name or ''!r} for device {device}, {dtype} and quantization "
            f"{options.quantization!r}; known: {known}"
        )
    able = [entry for entry in fitting if not needs & entry.lacks]
    best = max(fitting, key=lambda entry: entry.priority)
    if not able:
        lacking = ", ".join(sorted(needs & best.lacks))
        raise ValueError(
            f"the kernel backend {best.name!r} has no operation {lacking}, which the model needs; "
            "use another one"
        )
    chosen = max(able, key=lambda entry: entry.priority)
    if chosen is not best:
        logger.info(
            "kernel backend %s is used: %s has no operation %s, which the model needs",
            chosen.name,
            best.name,
            ", ".join(sorted(needs & best.lacks)),
        )
    return chosen.create(device, dtype, options)
