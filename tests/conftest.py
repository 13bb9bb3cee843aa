"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.process import Process

# Tests share the cores with the processes that they start: threads of torch that spin for work
# starve the others. Read when torch is loaded, so nothing that loads it is imported above.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def default_server() -> Iterator[Process]:
    """A server with the default model, for tests that only ask it things."""
    from tests.server.process import READY, Process

    process = Process()
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()
