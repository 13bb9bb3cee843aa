"""Tensors that lie between guard elements: the interpreter checks no bounds."""

import torch

GUARD_ROWS = 3


class Guards:
    """NaN around floats and an odd number around integers; `check` finds what overwrote them.

    What reads a guard gets NaN or an index far outside into its result.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor whose elements are guards, too, until they are written."""
        row = 1
        for size in shape[1:]:
            row *= size
        margin = GUARD_ROWS * max(row, 16)
        count = row * shape[0] if shape else 1
        buffer = torch.full((count + 2 * margin,), _guard(dtype)).to(dtype)
        self._buffers.append((buffer, margin))
        return buffer[margin : margin + count].view(shape)

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """A guarded copy."""
        copy = self.empty(tuple(tensor.shape), tensor.dtype)
        copy.copy_(tensor)
        return copy

    def check(self) -> None:
        """Fail if a guard was overwritten."""
        for buffer, margin in self._buffers:
            for edge in (buffer[:margin], buffer[-margin:]):
                floating = buffer.is_floating_point()
                same = edge.float().isnan() if floating else edge == _guard(buffer.dtype)
                assert bool(same.all()), f"a kernel wrote outside of a tensor of {buffer.dtype}"


def _guard(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max // 2 - 16
