"""Which arithmetic a model's linears get: the rule behind `--quantization`.

- `none`: weights in the model's dtype; those of a GGUF file are dequantised.
- `int8`: weights of linears and the embedding as eight bits with a scale per 32 along the input.
- `gguf`: a GGUF file's own blocks, packed as they are stored; types without a packed form become
  int8.
- `fp8`: weights of linears as e4m3, on CUDA devices.
- `auto`: `gguf` for a file whose matrices are all quantised and would take more than
  `LARGE_BYTES` in the dtype, where the backend has it; else `none`.

With `int8` and `gguf` the linears' inputs are quantised, too: eight bits, a scale per 32. Small
models are fast anyway, and their answers suffer most from that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trunkline.engine import resources
from trunkline.engine.models.config import DecoderConfig
from trunkline.engine.resources import SettingError
from trunkline.kernels import is_supported

LARGE_BYTES = 1 << 30
FLOAT_KINDS = frozenset({"F64", "F32", "F16", "BF16"})
# Eight bits, scale and offset (both float16) per 32: the most that a packed weight takes.
PACKED_ITEM_BYTES = 36 / 32
_NEEDS = {
    "int8": "a CPU and dtype bfloat16 or float32",
    "gguf": "a CPU and dtype bfloat16 or float32",
    "fp8": "a CUDA device",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint stores its weights.

    `kinds` are ggml types of its matrices, none if it is no GGUF file; `num_bytes` is what all
    weights take in the dtype of the activations.
    """

    kinds: frozenset[str] = frozenset()
    num_bytes: int = 0


def resolve_quantization(
    requested: str,
    stored: Stored,
    device: torch.device,
    dtype: torch.dtype,
    backend: str | None = None,
) -> str:
    """What `requested` means for a model; never `auto`.

    Args:
        requested: the setting.
        stored: the model's weights.
        device: where it runs.
        dtype: of the activations.
        backend: name of the backend, if it was chosen.

    Raises:
        SettingError: there is nothing to pack, or no backend does it there.
    """
    if requested == "auto":
        packed = bool(stored.kinds) and not stored.kinds & FLOAT_KINDS
        can = packed and stored.num_bytes > LARGE_BYTES
        can = can and is_supported(device, dtype, backend, "gguf")
        return "gguf" if can else "none"
    if requested == "gguf" and not stored.kinds - FLOAT_KINDS:
        raise SettingError(
            "quantization is 'gguf', but the model is no GGUF file with quantised matrices; use "
            "'int8' to quantise any model, or 'none'"
        )
    if not is_supported(device, dtype, backend, requested):
        where = f"device {device}, dtype {dtype}" + (f", backend {backend!r}" if backend else "")
        raise SettingError(
            f"quantization is {requested!r}, which needs {_NEEDS[requested]}; here: {where}; use "
            "'none'"
        )
    return requested


def weight_bytes(config: DecoderConfig, quantization: str, dtype: torch.dtype) -> int:
    """Memory of a model's weights, at most."""
    if quantization in ("int8", "gguf"):
        return int(resources.weight_bytes(config, 1) * PACKED_ITEM_BYTES)
    linear_bytes = 1 if quantization == "fp8" else dtype.itemsize
    return resources.weight_bytes(config, dtype.itemsize, linear_bytes)
