"""The operations a model is made of, and the backends that implement them."""

from trunkline.kernels.interface import (
    Activation,
    ActivationName,
    AttentionSpec,
    Backend,
    Batch,
    KvPool,
    KvSpec,
    LinearPart,
    LinearSpec,
    PageMove,
    RotarySpec,
    SampleInputs,
    SampleOutputs,
    StepInputs,
    Weight,
)
from trunkline.kernels.registry import BACKENDS, BackendEntry, select_backend

__all__ = [
    "BACKENDS",
    "Activation",
    "ActivationName",
    "AttentionSpec",
    "Backend",
    "BackendEntry",
    "Batch",
    "KvPool",
    "KvSpec",
    "LinearPart",
    "LinearSpec",
    "PageMove",
    "RotarySpec",
    "SampleInputs",
    "SampleOutputs",
    "StepInputs",
    "Weight",
    "select_backend",
]
