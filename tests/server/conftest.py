from collections.abc import Iterator

import pytest
from tests.server.live import Live


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
