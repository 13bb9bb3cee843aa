from collections.abc import Iterator

import pytest
from tests.server.process import READY, Process


@pytest.fixture(scope="session")
def default_server() -> Iterator[Process]:
    """A server with the default model, for tests that only ask it things."""
    process = Process()
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()
