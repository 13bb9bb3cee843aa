"""CUDA graphs of recurring work: captured once per size, largest first, in one memory pool.

A graph replays kernels with the arguments that they were captured with, so everything that changes
from step to step must lie at fixed addresses. On a device without graphs the work is simply done
again: the steps of tests take the same way as those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class CapturePool:
    """Memory for captures that are replayed in turns.

    They share one stream: memory that was freed on one stream is not given out on another, and
    cuBLAS keeps a workspace for each that it has run on.
    """

    handle: Any
    stream: torch.cuda.Stream


class Captured(Generic[Output]):
    """Work that is replayed with what now lies in the tensors it was captured with."""

    def __init__(self, work: Callable[[], Output], pool: CapturePool | None) -> None:
        """Run the work once, so that every kernel is compiled, then capture it.

        Args:
            work: launches kernels on the current stream, and neither waits nor reads their results;
                let go once it is captured, because it may hold who holds this.
            pool: of `capture_pool`.
        """
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Output
        if pool is None:
            self._work = work
            return
        stream = pool.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile: an embedding program's.
        mode = "thread_local"
        with torch.cuda.graph(
            self._graph, pool=pool.handle, stream=stream, capture_error_mode=mode
        ):
            self._output = work()

    def replay(self) -> Output:
        """Launch the work; what it returned when it was captured is written again."""
        if self._graph is None:
            return self._work()
        self._graph.replay()
        return self._output


def capture_pool(device: torch.device) -> CapturePool | None:
    """For captures on the current device; None where there are no graphs."""
    if device.type != "cuda":
        return None
    return CapturePool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))
