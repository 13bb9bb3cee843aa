"""The CPU backend: a model is recorded once and executed by native SIMD kernels, step by step."""

from trunkline.kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
