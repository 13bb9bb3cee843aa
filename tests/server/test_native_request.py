from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.live import Live

from trunkline.engine.config import EngineConfig, SchedulerOptions
from trunkline.engine.messages import LogprobRequest
from trunkline.engine.native_request import GenerateJob, RequestContext, parse_generate
from trunkline.engine.validation import Limits, RequestError
from trunkline.server.config import ServerConfig

CONTEXT = RequestContext(
    tokenizer=ByteTokenizer(), limits=Limits(vocab_size=300, context_length=32), defaults={}
)


def parse(context: RequestContext = CONTEXT, **body: Any) -> GenerateJob:
    return parse_generate(body, context)


def test_one_text():
    job = parse(text="abc")
    [request] = job.requests
    assert request.prompt_ids == [97, 98, 99]
    assert request.rid == job.rid
    assert len(job.rid) == 32
    assert not job.is_batch
    assert not job.stream
    assert request.stream_interval == 0


def test_a_batch_broadcasts_what_is_given_once():
    job = parse(text=["a", "b"], rid="r", sampling_params={"temperature": 0.5}, return_logprob=True)
    assert [request.rid for request in job.requests] == ["r_0", "r_1"]
    assert [request.sampling.temperature for request in job.requests] == [0.5, 0.5]
    assert [request.logprobs for request in job.requests] == [LogprobRequest(), LogprobRequest()]
    assert job.requests[0].sampling.seed != job.requests[1].sampling.seed


def test_a_batch_takes_lists():
    job = parse(
        input_ids=[[1, 2], [3]],
        rid=["x", "y"],
        sampling_params=[{"n": 2}, {"temperature": 0}],
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=[3, 0],
        token_ids_logprob=[[5], None],
        extra_key=["tenant", None],
        stream=True,
    )
    first, second = job.requests
    assert (first.rid, second.rid) == ("x", "y")
    assert (first.n, second.n) == (2, 1)
    assert first.logprobs == LogprobRequest(prompt_start=0, top_n=3, ids=[5])
    assert second.logprobs is None
    assert first.namespace != second.namespace == ""
    assert (job.is_batch, job.stream, first.stream_interval) == (True, True, 1)


def test_namespaces_do_not_collide():
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), ("a", None), (None, "a"), ("b", "a")]
    spaces = {parse(text="x", extra_key=e, cache_salt=c).requests[0].namespace for e, c in pairs}
    assert len(spaces) == len(pairs)
    assert parse(text="x", extra_key="", cache_salt=None).requests[0].namespace == ""


def test_unknown_and_pointless_fields_are_named():
    job = parse(text="x", banana=1, session_id="s", logprob_start_len=0, top_logprobs_num=0)
    assert job.ignored == ["banana", "logprob_start_len"]


def test_prompt_log_probs_from_the_end_are_none():
    request = parse(text="abc", return_logprob=True, logprob_start_len=3).requests[0]
    assert request.logprobs == LogprobRequest()


def test_priority_where_it_counts():
    context = replace(CONTEXT, priority_scheduling=True)
    assert parse(context, text="x", priority=-5).requests[0].priority == -5
    assert parse(text="x", priority=0).requests[0].priority == 0


def test_stream_interval():
    assert (
        parse(text="x", stream=True, sampling_params={"stream_interval": 4})
        .requests[0]
        .stream_interval
        == 4
    )


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text", "exactly one of text and input_ids must be given, got neither."),
        (
            {"text": "a", "input_ids": [1]},
            "text",
            "exactly one of text and input_ids must be given, got both.",
        ),
        ({"text": ""}, "text", "text is empty: a prompt needs at least one token."),
        ({"text": ["a", ""]}, "text[1]", "text[1] is empty"),
        ({"text": []}, "text", "text must have 1 to 2048 rows, got 0."),
        ({"text": 5}, "text", "text must be a string, got 5."),
        ({"text": ["a", 5]}, "text[1]", "text[1] must be a string, got 5."),
        ({"input_ids": []}, "input_ids", "input_ids is empty"),
        ({"input_ids": [[1, 2], []]}, "input_ids[1]", "input_ids[1] is empty"),
        ({"input_ids": [[1], [300]]}, "input_ids[1]", "[0, 300), got 300."),
        ({"input_ids": [-1]}, "input_ids", "[0, 300), got -1."),
        ({"input_ids": [1.5]}, "input_ids", "[0, 300), got 1.5."),
        ({"input_ids": [True]}, "input_ids", "[0, 300), got True."),
        ({"input_ids": [2**63]}, "input_ids", "[0, 300), got 9223372036854775808."),
        ({"input_ids": "abc"}, "input_ids", "input_ids must be a list of token ids"),
        ({"input_ids": [[1], 2]}, "input_ids[1]", "must be a list of token ids, got 2."),
        (
            {"text": "x" * 40},
            "text",
            "text has 40 tokens, which is longer than the model's context length of 32 tokens",
        ),
        ({"text": "a", "rid": ""}, "rid", "rid must have 1 to 256 characters, got 0."),
        ({"text": "a", "rid": "x" * 10_000}, "rid", "1 to 256 characters, got 10000."),
        ({"text": "a", "rid": "x\ny"}, "rid", "rid must be a printable string"),
        ({"text": "a", "rid": 5}, "rid", "rid must be a printable string, got 5."),
        ({"text": ["a", "b"], "rid": ["r", "r"]}, "rid", "Duplicate request ID detected"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid", "a list of 2 for a batch of 2."),
        ({"text": "a", "rid": ["r"]}, "rid", "rid must be a string"),
        ({"text": "a", "stream": 1}, "stream", "stream must be true or false, got 1."),
        ({"text": "a", "sampling_params": 5}, "sampling_params", "must be an object, got 5."),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "must be an object"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params", "2 entries for 1 rows."),
        ({"text": "a", "return_logprob": "yes"}, "return_logprob", "must be true or false"),
        (
            {"text": "abc", "return_logprob": True, "logprob_start_len": 4},
            "logprob_start_len",
            "logprob_start_len must be in [-1, 3] (the prompt's length), got 4.",
        ),
        (
            {"text": "abc", "return_logprob": True, "token_ids_logprob": [[1]]},
            "token_ids_logprob",
            "must hold token ids in [0, 300), got [1].",
        ),
        (
            {"text": "abc", "return_logprob": True, "top_logprobs_num": 999},
            "top_logprobs_num",
            "top_logprobs_num must be in [0, 128], got 999.",
        ),
        ({"text": "a", "priority": 5}, "priority", "--schedule-policy priority"),
        ({"text": "a", "priority": 2**40}, "priority", "must be a 32-bit integer"),
        ({"text": "a", "extra_key": 5}, "extra_key", "extra_key must be a string, got 5."),
        ({"text": "a", "extra_key": "x" * 2000}, "extra_key", "at most 1024 characters"),
        ({"text": "a", "image_data": ["x"]}, "image_data", "image_data is not supported"),
        ({"text": "a", "lora_path": "x"}, "lora_path", "lora_path is not supported"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states", "not supported"),
    ],
)
def test_refuses_naming_field_and_row(body: dict[str, Any], param: str, words: str):
    with pytest.raises(RequestError) as caught:
        parse_generate(body, CONTEXT)
    assert words in caught.value.message
    assert caught.value.param == param


def test_neutral_values_of_unsupported_fields_pass():
    job = parse(text="a", image_data=None, lora_path=None, return_hidden_states=False)
    assert job.ignored == []


def test_the_body_is_an_object():
    with pytest.raises(RequestError, match="the body must be a JSON object, got"):
        parse_generate([1], CONTEXT)


def test_processed_log_probs_stay_so_after_a_restart():
    scheduler = SchedulerOptions(logprobs_mode="processed")
    config = ServerConfig(engine=EngineConfig(scheduler=scheduler))
    with Live(FakeEngine(delay_s=0.1), config) as live:
        body = {"text": "hi", "stream": True, "return_logprob": True, "logprob_start_len": 0}
        with live.http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)  # the prompt is scored
            live.call(live.engine.kill)
            live.call(live.engine.restart)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        first, again = live.engine.submitted
        assert first.logprobs is not None
        assert again.logprobs == msgspec.structs.replace(first.logprobs, prompt_start=None)
        assert again.logprobs.processed
