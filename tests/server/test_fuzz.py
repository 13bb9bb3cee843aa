"""Whatever a body holds, the answer is a result or an error that names it; nothing breaks."""

import time
from collections import Counter
from pathlib import Path

import pytest
from tests.checkpoints import TinyCheckpoint
from tests.server.fuzz import fuzz
from tests.server.live import Live
from tests.server.test_process import READY, Process


def test_random_bodies(live: Live):
    answers = [fuzz(live.http, seed) for seed in range(400)]
    assert [complaint for _, complaint in answers if complaint] == []
    statuses = Counter(status for status, _ in answers)
    assert statuses[200] > 50
    assert statuses[400] > 50
    assert live.server.in_flight == 0
    assert live.server.children == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_bodies_for_a_real_engine(tmp_path: Path):
    process = Process(TinyCheckpoint().write(tmp_path / "model"))
    try:
        process.wait_for(READY)
        [engine] = process.children
        give_up_at = time.monotonic() + 120
        for seed in range(10_000, 14_000):
            assert fuzz(process.http, seed)[1] == ""
            if time.monotonic() > give_up_at:
                break
        assert process.http.get("/health_generate").status_code == 200
        assert process.children == [engine]
        assert "Traceback" not in "\n".join(process.lines)
    finally:
        process.close()
