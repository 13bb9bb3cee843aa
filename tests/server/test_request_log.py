import logging

import pytest
from tests.server.live import Live

from trunkline.server.config import LogOptions, ServerConfig


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_levels(level: int, caplog: pytest.LogCaptureFixture):
    config = ServerConfig(logs=LogOptions(log_requests=True, log_requests_level=level))
    with Live(config=config) as live, caplog.at_level(logging.INFO, logger="trunkline.server"):
        live.generate(text="a prompt", rid="r", sampling_params={"stop": ["never said"]})
        live.generate(text="left", rid="s", sampling_params={"max_new_tokens": 0})
    received, finished, *_ = [record.getMessage() for record in caplog.records]
    assert received.startswith("Receive: obj=GenerateReqInput(rid='r', prompt_tokens=8, n=1")
    assert finished.startswith("Finish: obj=GenerateReqInput(rid='r'")
    assert "'completion_tokens': 12, 'finish_reason': {'type': 'stop', 'matched': 256}" in finished
    assert ("'temperature': 1.0" in received) is (level >= 1)
    assert ("a prompt" in received) is (level >= 2)
    assert ("never said" in finished) is (level >= 2)
    assert ("Hello world" in finished) is (level >= 2)


def test_off_by_default(caplog: pytest.LogCaptureFixture):
    with Live() as live, caplog.at_level(logging.INFO, logger="trunkline.server"):
        live.generate(text="a prompt", banana=1)
        live.generate(text="a prompt", banana=1)
    assert [record.getMessage() for record in caplog.records] == [
        "ignoring the request field 'banana': it is unknown, or has no effect"
    ]
