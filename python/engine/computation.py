"""From the settings of how to compute to a backend and its options: pure functions.

What needs hardware that is not there is refused here, before any weight is read; what depends on
the model is refused by the backend.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from trunkline.engine import resources
from trunkline.engine.config import KernelOptions
from trunkline.engine.quantization import Stored, resolve_quantization
from trunkline.engine.resources import SettingError
from trunkline.kernels import BackendOptions


@dataclass(frozen=True, slots=True)
class Computation:
    """Name of the kernel backend (None: the best for the device) and what it is asked for."""

    backend: str | None
    options: BackendOptions


def computation(
    options: KernelOptions,
    device: torch.device,
    dtype: torch.dtype,
    stored: Stored,
    device_bytes: int,
) -> Computation:
    """Work out how to compute.

    Args:
        options: the settings.
        device: where.
        dtype: of the activations.
        stored: the checkpoint's weights.
        device_bytes: its memory.

    Raises:
        SettingError: settings contradict each other, or this device cannot do what they ask for.
    """
    attention = options.attention_backend
    # Triton's interpreter runs the CUDA kernels on a CPU, for tests.
    on_cuda = device.type == "cuda" or (
        attention == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    )
    _check(options, device, on_cuda)
    backend = "torch" if attention == "torch_native" else "triton" if on_cuda else None
    quantization = resolve_quantization(options.quantization, stored, device, dtype, backend)
    if backend != "triton":
        return Computation(backend, BackendOptions(quantization=quantization))
    deterministic = options.enable_deterministic_inference
    rows = resources.graph_rows(
        options.cuda_graph_max_bs, disabled=options.disable_cuda_graph, device_bytes=device_bytes
    )
    return Computation(
        "triton",
        BackendOptions(
            attention=attention,
            kv_dtype=options.kv_cache_dtype,
            quantization=quantization,
            deterministic=deterministic,
            max_graph_batch=rows if device.type == "cuda" else 0,
        ),
    )


def _check(options: KernelOptions, device: torch.device, on_cuda: bool) -> None:
    for name, value, neutral in (
        ("attention_backend", options.attention_backend, ("auto", "torch_native")),
        ("kv_cache_dtype", options.kv_cache_dtype, ("auto",)),
    ):
        if value in neutral:
            continue
        if not on_cuda:
            raise SettingError(
                f"{name} is {value!r}, which needs a CUDA device, but the device is {device}; "
                f"use {neutral[0]!r}"
            )
        if options.attention_backend == "torch_native":
            raise SettingError(
                f"{name} is {value!r}, which the reference backend (attention_backend "
                f"'torch_native') does not have; use {neutral[0]!r}"
            )
    if options.enable_deterministic_inference and options.attention_backend == "flashinfer":
        raise SettingError(
            "attention_backend is 'flashinfer', whose order of sums varies; with "
            "enable_deterministic_inference use 'auto' or 'triton'"
        )
