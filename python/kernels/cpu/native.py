"""The only module of this package that imports the extension."""

from trunkline._core import (
    CpuAttentionBench,
    CpuLinearBench,
    CpuModel,
    CpuPopulation,
    cpu_block_kinds,
    cpu_isas,
)

__all__ = [
    "CpuAttentionBench",
    "CpuLinearBench",
    "CpuModel",
    "CpuPopulation",
    "cpu_block_kinds",
    "cpu_isas",
]
