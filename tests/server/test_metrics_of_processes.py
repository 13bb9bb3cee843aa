"""Counts of several HTTP processes, shown as one."""

from __future__ import annotations

import msgspec

from trunkline.server.metrics import Metrics, Snapshot


def test_a_snapshot_stays_as_it_was_taken() -> None:
    metrics = Metrics("m")
    metrics.observe("queue_time_seconds", 0.0, is_streaming=True)
    snapshot = metrics.snapshot()
    text = msgspec.json.encode(snapshot)
    metrics.observe("queue_time_seconds", 0.0, is_streaming=True)
    assert msgspec.json.encode(snapshot) == text
    assert metrics.snapshot() != snapshot, "or nobody would be told"


def test_counts_of_others_are_added_and_survive_them() -> None:
    first, other = Metrics("m"), Metrics("m")
    for metrics, requests in ((first, 2), (other, 3)):
        metrics.count("num_requests_total", requests, "false")
        metrics.observe("e2e_request_latency_seconds", 0.3, False, times=requests)
        metrics.http_active = requests
    other.count("num_requests_total", 1, "true")

    def told() -> set[str]:
        lines = first.render().decode().splitlines()
        names = ("engine_num_requests_total", "engine_http_requests_active", "engine_e2e_request")
        return {line for line in lines if line.startswith(names) and not line.endswith(" 0.0")}

    first.include(2, msgspec.json.decode(msgspec.json.encode(other.snapshot()), type=Snapshot))
    first.include(2, msgspec.json.decode(msgspec.json.encode(other.snapshot()), type=Snapshot))
    both = told()
    assert 'engine_num_requests_total{is_streaming="false",model_name="m"} 5.0' in both
    assert 'engine_num_requests_total{is_streaming="true",model_name="m"} 1.0' in both
    assert 'engine_http_requests_active{model_name="m"} 5.0' in both
    bucket = (
        'engine_e2e_request_latency_seconds_bucket{is_streaming="false",le="0.4",model_name="m"}'
    )
    assert f"{bucket} 5.0" in both
    first.ended(2)
    first.ended(2)
    gone = 'engine_http_requests_active{model_name="m"} '
    assert told() == both - {gone + "5.0"} | {gone + "2.0"}
