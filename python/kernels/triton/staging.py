"""From host arrays to the device and back: one copy each way per step, never waiting in between.

Host memory is pinned where there is a CUDA device. On other devices the same code copies at once,
so that tests run it without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

ALIGNMENT = 16
TORCH_DTYPES: Mapping[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Fence:
    """A point in the current stream's work, once it is `set`; devices without streams need none."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def set(self, device: torch.device) -> None:
        """Mark the end of what was launched so far."""
        if device.type == "cuda":
            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Return when the device is past it."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(slots=True)
class _HostBlock:
    """Host memory that a copy to the device reads from until `copied`."""

    tensor: torch.Tensor  # [bytes] uint8
    copied: Fence = field(default_factory=Fence)


class StagingArena:
    """Packs a step's arrays and copies them to the device at once.

    The device's block never moves: in steps that fit it arrays of equal shapes lie at equal
    addresses, where CUDA graphs read them. A step that needs more gets a block of its own. Views
    are valid for what is launched before the next call: its copy is ordered behind that, on the
    current stream. The host's blocks go round, and one is written again only when its copy is
    through.
    """

    def __init__(self, device: torch.device, num_bytes: int, num_blocks: int = 3) -> None:
        """Allocate.

        Args:
            device: where the arrays go.
            num_bytes: size of the device's block, and first size of the host's.
            num_blocks: host blocks in turn.
        """
        self._device = device
        self._device_block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._blocks = deque(_HostBlock(self._host(num_bytes)) for _ in range(num_blocks))

    def _host(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def fits(self, arrays: Mapping[str, Array]) -> bool:
        """Whether arrays go to the block that never moves."""
        return _total_bytes(arrays) <= self._device_block.numel()

    def stage(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Copy arrays to the device, in order, each at a multiple of `ALIGNMENT` bytes."""
        total = _total_bytes(arrays)
        device = self._device_block
        if total > device.numel():
            device = device.new_empty(total)
        block = self._next_block(total)
        host = block.tensor.numpy()
        views = {}
        offset = 0
        for name, array in arrays.items():
            end = offset + array.nbytes
            host[offset:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            views[name] = view(device, offset, array.shape, TORCH_DTYPES[array.dtype])
            offset += _aligned(array.nbytes)
        device[:total].copy_(block.tensor[:total], non_blocking=True)
        block.copied.set(self._device)
        return views

    def _next_block(self, num_bytes: int) -> _HostBlock:
        block = self._blocks[0]
        self._blocks.rotate(-1)
        block.copied.wait()
        if block.tensor.numel() < num_bytes:
            block.tensor = self._host(2 * num_bytes)
        return block


def view(
    block: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A part of a block of bytes as an array."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return block[offset : offset + num_bytes].view(dtype).view(tuple(shape))


def _total_bytes(arrays: Mapping[str, Array]) -> int:
    return sum(_aligned(array.nbytes) for array in arrays.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Readback:
    """Device tensors on their way to the host; `wait` gives them as arrays."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin the copies, behind everything that was launched before on the current stream."""
        self._host: dict[str, torch.Tensor] = {}
        self._copied = Fence()
        for name, tensor in tensors.items():
            on_cuda = tensor.device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
            host.copy_(tensor, non_blocking=True)
            self._host[name] = host
            self._copied.set(tensor.device)

    def wait(self) -> dict[str, Array]:
        """The arrays, once the device has written them."""
        self._copied.wait()
        return {name: tensor.numpy() for name, tensor in self._host.items()}
