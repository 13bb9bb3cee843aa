"""The `/generate` object: keys, meanings, incremental parts, log-prob blocks."""

from __future__ import annotations

import json
import math

import pytest

from trunkline.engine.client import Request, Stream, Update
from trunkline.engine.messages import (
    Accepted,
    Delta,
    Finished,
    LogprobRequest,
    Logprobs,
    SamplingParams,
    Started,
)
from trunkline.engine.outputs import OutputOptions, finish_reason, generate_output

# In the order of the reference response.
META_KEYS = [
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_versions",
    "cached_tokens_details",
    "dp_rank",
    "e2e_latency",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
    "response_sent_to_client_ts",
]


def finished(reason: str = "length", **fields: object) -> Finished:
    values = {
        "key": 1,
        "sample": 0,
        "token_offset": 1,
        "token_ids": [12, 13],
        "text_offset": 2,
        "text": "lo!",
        "logprobs": None,
        "prompt_logprobs": None,
        "reason": reason,
        "matched": None,
        "message": None,
        "status": 0,
        "completion_tokens": 3,
        "num_retractions": 1,
        "queue_time": 0.5,
    }
    return Finished(**{**values, **fields})  # type: ignore[arg-type]


def stream_of(logprobs: LogprobRequest | None = None, n: int = 1) -> Stream:
    request = Request(
        rid="abc",
        prompt_ids=[5, 6, 7],
        sampling=SamplingParams(),
        n=n,
        logprobs=logprobs,
        received_ts=100.0,
    )
    stream = Stream(request, 1, 1, lambda _: None)
    stream.dispatched_ts = 100.1
    return stream


def played(stream: Stream) -> Stream:
    stream.apply(Accepted(1), 100.2)
    stream.apply(Started(1, 0, 2, 1, 100.3, 100.4, 0.25), 100.5)
    stream.apply(Delta(1, 0, 0, [11], 0, "he"), 100.5)
    stream.apply(finished(), 102.5)
    return stream


def test_a_finished_output_has_every_key_with_its_meaning() -> None:
    stream = played(stream_of())
    output = generate_output(stream, stream.samples[0], 103.0, OutputOptions())
    assert output["text"] == "helo!"
    assert output["output_ids"] == [11, 12, 13]
    meta = output["meta_info"]
    assert isinstance(meta, dict)
    assert list(meta) == META_KEYS
    rounded = {k: round(v, 9) if isinstance(v, float) else v for k, v in meta.items()}
    assert rounded == {
        "id": "abc",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "weight_version": "default",
        "num_retractions": 1,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": 100.3,
        "prefill_finished_time": 100.4,
        "queue_time": 0.5,
        "reasoning_tokens": 0,
        "completion_tokens": 3,
        "cached_tokens": 3,
        "weight_versions": [{"version": "default", "start": 0, "end": 3}],
        "cached_tokens_details": {"device": 2, "host": 1},
        "dp_rank": None,
        "e2e_latency": 2.5,
        "request_received_ts": 100.0,
        "first_token_latency": 0.4,
        "api_server_dispatch_finish_ts": 100.1,
        "request_finished_ts": 102.5,
        "decode_throughput": round(2 / 2.1, 9),
        "response_sent_to_client_ts": 103.0,
    }
    json.dumps(output, allow_nan=False)


def test_a_streamed_output_counts_latency_to_what_the_client_saw() -> None:
    stream = played(stream_of())
    output = generate_output(stream, stream.samples[0], 103.0, OutputOptions(streamed=True))
    meta = output["meta_info"]
    assert isinstance(meta, dict)
    assert meta["first_token_latency"] == pytest.approx(0.5)
    assert meta["decode_throughput"] == pytest.approx(1.0)


def test_what_has_no_value_yet_is_null() -> None:
    stream = stream_of(n=2)
    output = generate_output(stream, stream.samples[1], 101.0, OutputOptions(), index=1)
    meta = output["meta_info"]
    assert isinstance(meta, dict)
    assert list(meta) == META_KEYS
    assert (meta["id"], output["index"]) == ("abc_1", 1)
    null = {key for key, value in meta.items() if value is None}
    assert null == {
        "finish_reason",
        "forward_entry_time",
        "prefill_finished_time",
        "queue_time",
        "weight_versions",
        "cached_tokens_details",
        "dp_rank",
        "e2e_latency",
        "first_token_latency",
        "request_finished_ts",
        "decode_throughput",
    }
    assert meta["num_retractions"] == 0


def test_retractions_are_told_while_the_sample_runs() -> None:
    stream = stream_of()
    stream.apply(Delta(1, 0, 0, [11], 0, "he", num_retractions=2), 100.5)
    output = generate_output(stream, stream.samples[0], 101.0, OutputOptions())
    meta = output["meta_info"]
    assert isinstance(meta, dict)
    assert (meta["finish_reason"], meta["num_retractions"]) == (None, 2)


def test_incremental_outputs_hold_the_new_part_and_join_to_the_whole() -> None:
    stream = stream_of()
    updates: list[Update] = []
    for event in (Delta(1, 0, 0, [11], 0, "he"), finished()):
        stream.apply(event, 100.5)
        updates += stream._take()
    options = OutputOptions(incremental=True)
    parts = [
        generate_output(stream, stream.samples[0], 101.0, options, update=update)
        for update in updates
    ]
    assert [part["text"] for part in parts] == ["he", "lo!"]
    assert [part["output_ids"] for part in parts] == [[11], [12, 13]]
    with pytest.raises(ValueError, match="needs its update"):
        generate_output(stream, stream.samples[0], 101.0, options)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (finished("stop", matched=7), {"type": "stop", "matched": 7}),
        (finished("stop", matched="\n\n"), {"type": "stop", "matched": "\n\n"}),
        (finished("length"), {"type": "length", "length": 3}),
        (
            finished("abort"),
            {
                "type": "abort",
                "message": "the request was aborted",
                "status_code": None,
                "err_type": None,
            },
        ),
        (
            finished("error", message="logits are not finite", status=500),
            {
                "type": "abort",
                "message": "logits are not finite",
                "status_code": 500,
                "err_type": "InternalServerError",
            },
        ),
        (None, None),
    ],
)
def test_finish_reasons(event: Finished | None, expected: object) -> None:
    assert finish_reason(event) == expected


def test_logprob_blocks() -> None:
    stream = stream_of(LogprobRequest(prompt_start=0, top_n=2, ids=[9]))
    prompt = Logprobs(
        [math.nan, -1.0, -2.0],
        [[], [(-0.1, 6), (-3.0, 1)], [(-0.2, 7), (-math.inf, 2)]],
        [[], [(-4.0, 9)], [(-5.0, 9)]],
    )
    first = Logprobs([-0.5], [[(-0.5, 11), (-2.5, 3)]], [[(-7.0, 9)]])
    last = Logprobs([-0.25, -math.inf], [[(-0.25, 12)], []], [[(-8.0, 9)], [(-9.0, 9)]])
    stream.apply(Delta(1, 0, 0, [11], 0, "he", first, prompt), 100.5)
    stream.apply(finished(logprobs=last), 102.5)
    options = OutputOptions(token_text=lambda token_id: f"t{token_id}")
    output = generate_output(stream, stream.samples[0], 103.0, options)
    meta = output["meta_info"]
    assert isinstance(meta, dict)
    assert {key: meta[key] for key in meta if key not in META_KEYS} == {
        "input_token_logprobs": [[None, 5, "t5"], [-1.0, 6, "t6"], [-2.0, 7, "t7"]],
        "input_top_logprobs": [
            None,
            [[-0.1, 6, "t6"], [-3.0, 1, "t1"]],
            [[-0.2, 7, "t7"]],
        ],
        "input_token_ids_logprobs": [None, [[-4.0, 9, "t9"]], [[-5.0, 9, "t9"]]],
        "output_token_logprobs": [[-0.5, 11, "t11"], [-0.25, 12, "t12"], [-9999.0, 13, "t13"]],
        "output_token_logprobs_length": 3,
        "output_top_logprobs": [[[-0.5, 11, "t11"], [-2.5, 3, "t3"]], [[-0.25, 12, "t12"]], None],
        "output_token_ids_logprobs": [[[-7.0, 9, "t9"]], [[-8.0, 9, "t9"]], [[-9.0, 9, "t9"]]],
    }
    json.dumps(output, allow_nan=False)
