"""The only module of this package that imports the extension."""

from trunkline._core import CpuLinearBench, CpuModel, cpu_block_kinds, cpu_isas

__all__ = ["CpuLinearBench", "CpuModel", "cpu_block_kinds", "cpu_isas"]
