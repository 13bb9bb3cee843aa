"""The reference backend: plain torch, any device, batch-invariant to the bit."""

from trunkline.kernels.torch_reference.backend import TorchBackend

__all__ = ["TorchBackend"]
