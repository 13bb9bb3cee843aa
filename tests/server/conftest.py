from collections.abc import Iterator

import pytest
from tests.server.live import Live
from tests.server.process import READY, Process


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One server for the tests of a file; none of them changes its engine."""
    with Live() as server:
        yield server


@pytest.fixture
def fresh() -> Iterator[Live]:
    """A server of the test's own."""
    with Live() as server:
        yield server


@pytest.fixture(scope="session")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A real server with the default model, for tests that only ask it things.

    Its context is short: what sets no limit of its own ends within seconds.
    """
    storage = str(tmp_path_factory.mktemp("storage"))
    process = Process(None, "--context-length", "512", "--file-storage-path", storage)
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()
