"""Whole steps over tensors that claim to be on a CUDA device, which this machine need not have.

    python -m tests.kernels.triton.fake_device

torch's fake tensors have a device, a dtype and strides but no memory, and what is called with them
checks its arguments as it does on that device: tensors of two devices, dtypes of products, scales
per row of fp8 products. Kernels are not launched; their tensors have to be on the device. Streams,
events and graphs are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # decided when Triton is imported

import torch
from tests.kernels.triton.cases_program import FAMILIES, run_steps
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from trunkline.engine.models.config import ExpertsConfig
from trunkline.kernels.triton import decode_steps
from trunkline.kernels.triton.launch import KNOWN_TRAITS, assume_device
from trunkline.kernels.triton.program import DeviceProgram
from trunkline.kernels.triton.staging import TORCH_DTYPES, Array, Fence, StagingArena

DEVICE = torch.device("cuda")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_dtype": "fp8_e4m3"},
    {"quantization": "fp8"},
    {"deterministic": True},
    {"quantization": "fp8", "deterministic": True},
)
# As `SIZES`, with experts that can be quantised.
EXPERTS = ExpertsConfig(
    num_experts=8, top_k=3, intermediate_size=32, renormalise=True, sparse_layers=()
)


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Tensor) and argument.device.type != DEVICE.type:
            raise AssertionError(f"{kernel.fn.__name__} is given a tensor on {argument.device}")


def _stage(arena: StagingArena, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(array.shape, dtype=TORCH_DTYPES[array.dtype], device=DEVICE)
        for name, array in arrays.items()
    }


@contextmanager
def fake_device() -> Iterator[None]:
    """Let everything that is created on `DEVICE` be fake."""
    with ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", _launch),
            (StagingArena, "stage", _stage),
            (Fence, "set", lambda fence, device: None),
            (DeviceProgram, "_on_device", lambda program: nullcontext()),
            (decode_steps, "capture_pool", lambda device: None),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(assume_device(KNOWN_TRAITS[90]))
        stack.enter_context(FakeTensorMode())
        yield


def run(family: str, options: dict[str, Any]) -> None:
    """Steps of a family under `fake_device`.

    Raises:
        RuntimeError, AssertionError: torch refuses a call, or a tensor is not on the device.
    """
    changes = {"experts": EXPERTS} if family == "qwen3-moe" else {}
    run_steps(DEVICE, family, options, **changes)


def main() -> None:
    """Run all families with all options."""
    for family in (*FAMILIES, "llama-biases"):
        for options in OPTIONS:
            with fake_device():
                run(family, options)


if __name__ == "__main__":
    main()
