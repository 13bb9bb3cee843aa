"""CUDA graphs of recurring work: captured once per size, largest first, in one memory pool.

A graph replays kernels with the arguments that they were captured with, so everything that changes
from step to step must lie at fixed addresses. On a device without graphs the work is simply done
again: the steps of tests take the same way as those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Output = TypeVar("Output")


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Numbers of rows to capture: every small one, then in steps of about an eighth, ascending."""
    buckets = []
    size = 1
    while size < largest:
        buckets.append(size)
        size += max(1, 1 << max(size.bit_length() - 3, 0)) if size >= 8 else size
    return (*buckets, largest) if largest > 0 else ()


class Captured(Generic[Output]):
    """Work that is replayed with what now lies in the tensors it was captured with."""

    def __init__(self, work: Callable[[], Output], device: torch.device, pool: Any) -> None:
        """Run the work once, so that every kernel is compiled, then capture it.

        Args:
            work: launches kernels on the current stream, and neither waits nor reads their results.
            device: where it runs.
            pool: of `graph_pool`; its memory is shared by captures that are replayed in turns.
        """
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Output
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile: an embedding program's.
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode=mode):
            self._output = work()

    def replay(self) -> Output:
        """Launch the work; what it returned when it was captured is written again."""
        if self._graph is None:
            return self._work()
        self._graph.replay()
        return self._output


def graph_pool(device: torch.device) -> Any:
    """Memory for captures; None where there are no graphs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
