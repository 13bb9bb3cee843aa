"""Tests that run Triton kernels in the interpreter; they need a process of their own.

Triton decides when it is imported whether functions are compiled or interpreted, also its own, and
the interpreter cannot be switched on later. So these files are collected only where
TRITON_INTERPRET=1 stands in the environment from the start; `tests/kernels/test_triton.py` runs
them so, and by hand `TRITON_INTERPRET=1 python -m pytest tests/kernels/triton` does.
"""

import os
from collections.abc import Iterator

import pytest
from tests.kernels.triton.guards import Guards

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture
def guards() -> Iterator[Guards]:
    """Makes tensors that lie between guard elements, which must be intact when the test ends."""
    made = Guards()
    yield made
    made.check()
