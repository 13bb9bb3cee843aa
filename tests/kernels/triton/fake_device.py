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

import numpy as np
import torch
from tests.kernels.tiny import decoder_config
from tests.kernels.triton.cases_program import FAMILIES, GEMMA_SIZES, SAMPLES, SIZES, plans
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from trunkline.engine.models.config import ExpertsConfig
from trunkline.engine.models.registry import model_factory
from trunkline.kernels import BackendOptions, KvSpec, ProgramSizes
from trunkline.kernels.triton import decode_steps
from trunkline.kernels.triton.backend import TritonBackend
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


def run_steps(family: str, options: dict[str, Any]) -> None:
    """A prompt, and decode steps with and without everything that a sample can want.

    Raises:
        RuntimeError, AssertionError: torch refuses a call, or a tensor is not on the device.
    """
    changes = {**SIZES, **GEMMA_SIZES.get(family, {})}
    if family == "qwen3-moe":
        changes["experts"] = EXPERTS
    config = decoder_config(family, **changes)
    chosen = BackendOptions(attention="triton", max_graph_batch=4, **options)
    backend = TritonBackend(DEVICE, torch.bfloat16, chosen)
    with torch.inference_mode():
        model = model_factory(config.architecture)(config, backend, config.max_position, False)
    kv = KvSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=32,
        page_size=16,
    )
    sizes = ProgramSizes(kv=kv, num_slots=8, max_context_len=config.max_position)
    program = backend.create_program(model.forward, sizes)
    masks = np.full((len(SAMPLES), config.vocab_size // 32), -1, np.int32)
    for plan in plans():
        program.forward(plan)
        program.sample(plan, masks)


def main() -> None:
    """Run all families with all options."""
    for family in (*FAMILIES, "llama-biases"):
        for options in OPTIONS:
            with fake_device():
                run_steps(family, options)


if __name__ == "__main__":
    main()
