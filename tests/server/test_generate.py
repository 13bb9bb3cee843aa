import time
from itertools import pairwise

import pytest
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.live import Live
from tests.server.sse import events

from trunkline.server.config import ApiOptions, ServerConfig

META_KEYS = [
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"),
    *("storage_prefetch_wait", "storage_staging_wait", "forward_entry_time"),
    *("prefill_finished_time", "queue_time", "reasoning_tokens", "completion_tokens"),
    *("cached_tokens", "weight_versions", "cached_tokens_details", "dp_rank", "e2e_latency"),
    *("request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts"),
    *("request_finished_ts", "decode_throughput", "response_sent_to_client_ts"),
]


def test_one_prompt_gives_one_object(live: Live):
    before = time.time()
    response = live.generate(text="abcde", rid="mine", sampling_params={"max_new_tokens": 5})
    body = response.json()
    assert list(body) == ["text", "output_ids", "meta_info"]
    assert body["text"] == "Hello"
    assert body["output_ids"] == list(b"Hello")
    meta = body["meta_info"]
    assert list(meta) == META_KEYS
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 5)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
    assert meta["cached_tokens"] == sum(meta["cached_tokens_details"].values()) == 2
    assert before <= meta["request_received_ts"] <= meta["api_server_dispatch_finish_ts"]
    assert meta["e2e_latency"] == pytest.approx(
        meta["request_finished_ts"] - meta["request_received_ts"]
    )


def test_the_end_token_is_counted_and_not_shown(live: Live):
    body = live.generate(text="x").json()
    assert body["text"] == "Hello world"
    assert body["output_ids"][-1] == EOS
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_no_new_tokens(live: Live):
    body = live.generate(text="x", sampling_params={"max_new_tokens": 0}).json()
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["completion_tokens"] == 0
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert body["meta_info"]["decode_throughput"] is None


def test_put_works_too(live: Live):
    assert live.http.put("/generate", json={"text": "x"}).status_code == 200


def test_samples_are_a_list_with_ids_of_their_own(live: Live):
    body = live.generate(text="x", rid="r", sampling_params={"n": 3}).json()
    assert [one["meta_info"]["id"] for one in body] == ["r_0", "r_1", "r_2"]
    assert isinstance(live.generate(text="x", sampling_params={"n": 1}).json(), dict)


def test_a_batch_is_a_list_even_of_one(live: Live):
    [one] = live.generate(text=["x"]).json()
    assert one["text"] == "Hello world"
    first, second = live.generate(
        input_ids=[[1, 2], [3]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_prompt_token_ids=True,
    ).json()
    assert (first["text"], second["text"]) == ("H", "He")
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == ([1, 2], [3])


def test_log_probs(live: Live):
    meta = live.generate(
        text="abc",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=[7],
        return_text_in_logprobs=True,
    ).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.098, 98, "b"], [-0.099, 99, "c"]]
    assert meta["output_token_logprobs"] == [[-0.072, 72, "H"], [-0.101, 101, "e"]]
    assert meta["output_top_logprobs"][0] == [[-0.072, 72, "H"], [-0.073, 73, "I"]]
    assert meta["output_token_ids_logprobs"] == [[[-0.007, 7, "\x07"]]] * 2


def test_log_probs_from_the_start_begin_with_null(live: Live):
    meta = live.generate(text="ab", return_logprob=True, logprob_start_len=0).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, None], [-0.098, 98, None]]


def test_streams_are_cumulative(live: Live):
    chunks = events(live.generate(text="x", stream=True))
    whole = live.generate(text="x").json()
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert all(later["text"].startswith(one["text"]) for one, later in pairwise(chunks))
    assert all(list(chunk["meta_info"]) == META_KEYS for chunk in chunks)
    reasons = [chunk["meta_info"]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [{"type": "stop", "matched": EOS}]
    assert "index" not in chunks[0]


def test_streams_of_batches_have_an_index():
    engine = FakeEngine(
        answer=lambda prompt, sample: f"{bytes(prompt).decode()}{sample}", delay_s=0
    )
    with Live(engine) as live:
        body = {"text": ["a", "b"], "sampling_params": {"n": 2}}
        chunks = events(live.generate(**body, stream=True))
        last = {chunk["index"]: chunk["text"] for chunk in chunks}
        assert last == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
        assert [one["text"] for one in live.generate(**body).json()] == ["a0", "a1", "b0", "b1"]


def test_incremental_streams_have_what_is_new():
    config = ServerConfig(api=ApiOptions(incremental_streaming_output=True))
    with Live(FakeEngine(delay_s=0.002), config) as live:
        chunks = events(live.generate(text="x", stream=True, return_logprob=True))
        assert "".join(chunk["text"] for chunk in chunks) == "Hello world"
        assert [i for chunk in chunks for i in chunk["output_ids"]] == [*b"Hello world", EOS]
        scores = [s for chunk in chunks for s in chunk["meta_info"]["output_token_logprobs"]]
        assert [score[1] for score in scores] == [*b"Hello world", EOS]


def test_ignored_fields_are_named(live: Live):
    response = live.generate(text="x", banana=1, **{"knöpfe\n": 2})
    assert response.headers["x-ignored-fields"] == "banana, kn?pfe?"
    assert events(live.generate(text="x", stream=True, banana=1))
    assert "x-ignored-fields" not in live.generate(text="x").headers


def test_stop_strings(live: Live):
    body = live.generate(text="x", sampling_params={"stop": ["never", "o w"]}).json()
    assert body["text"] == "Hell"
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "o w"}
    assert bytes(body["output_ids"]) == b"Hello w"


def test_the_seed_depends_on_the_rid_alone(live: Live):
    for rid in ("one", "two", "one"):
        live.generate(text="x", rid=rid)
    first, second, third = (submit.sampling.seed for submit in live.engine.submitted[-3:])
    assert first == third != second


def test_sampling_defaults():
    api = ApiOptions(preferred_sampling_params='{"max_new_tokens": 3, "top_k": 5}')
    with Live(config=ServerConfig(api=api), model_sampling={"temperature": 0.25}) as live:
        assert live.generate(text="x").json()["text"] == "Hel"
        native = live.engine.submitted[-1].sampling
        assert (native.top_k, native.temperature) == (5, 1.0)
        assert live.chat().json()["choices"][0]["message"]["content"] == "Hel"
        chat = live.engine.submitted[-1].sampling
        assert (chat.top_k, chat.temperature) == (5, 0.25)
        live.chat(temperature=2, top_k=-1, max_tokens=4)
        asked = live.engine.submitted[-1].sampling
        assert (asked.top_k, asked.temperature, asked.max_new_tokens) == (0, 2.0, 4)
        defaults = live.http.get("/server_info").json()["default_sampling_params"]
        assert defaults == {
            "native": {"max_new_tokens": 3, "top_k": 5},
            "openai": {"temperature": 0.25, "max_new_tokens": 3, "top_k": 5},
        }


def test_recommendations_that_no_request_could_have_are_left_out():
    recommended = {"temperature": 0.5, "top_k": 0, "top_p": 0, "repetition_penalty": 9}
    with Live(model_sampling=recommended) as live:
        assert live.chat().status_code == 200
        defaults = live.http.get("/server_info").json()["default_sampling_params"]["openai"]
        assert defaults == {"temperature": 0.5, "top_k": -1}


def test_openai_defaults_instead_of_the_models():
    config = ServerConfig(api=ApiOptions(sampling_defaults="openai"))
    with Live(config=config, model_sampling={"temperature": 0.25}) as live:
        live.chat()
        assert live.engine.submitted[-1].sampling.temperature == 1.0
