import pytest
from tests.chat_templates import GEMMA2
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.live import MODEL, Live
from tests.server.sse import events, texts


def test_the_answer_has_exactly_these_rows(live: Live):
    body = live.chat().json()
    keys = "id object created model system_fingerprint choices usage metadata"
    assert list(body) == keys.split()
    assert len(body["id"]) == 32
    assert int(body["id"], 16) >= 0
    assert (body["object"], body["model"]) == ("chat.completion", "default")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello world",
                "refusal": None,
                "reasoning_content": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": EOS,
        }
    ]
    prompt = len("<user>hi\n<assistant>")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "total_tokens": prompt + 12,
        "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
        "reasoning_tokens": 0,
    }
    assert body["metadata"] == {
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 12}],
    }


def test_the_model_is_echoed_as_sent(live: Live):
    for name in (MODEL, "default"):
        assert live.chat(model=name).json()["model"] == name
    response = live.chat(model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


def test_streams_begin_with_roles_and_end_with_reasons(live: Live):
    chunks = events(live.chat(stream=True, n=2))
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "default", "chat.completion.chunk")
    }
    assert all("usage" not in chunk for chunk in chunks)
    role = {"role": "assistant", "content": "", "reasoning_content": None}
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert choices[0]["delta"] == role
        assert not any("role" in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["matched_stop"] == EOS
        assert choices[-1]["delta"] == {}
    assert texts(chunks) == {0: "Hello world", 1: "Hello world"}


def test_usage_comes_once_and_last(live: Live):
    whole = live.chat().json()["usage"]
    chunks = events(live.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])
    without = events(live.chat(stream=True, stream_options={"include_usage": False}))
    assert all("usage" not in chunk for chunk in without)


def test_continuous_usage(live: Live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(live.chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == 12


@pytest.mark.parametrize("interval", [1, 2, 4, 7])
def test_log_probs_are_the_same_in_a_stream(live: Live, interval: int):
    fields = {"logprobs": True, "top_logprobs": 3, "stream_interval": interval}
    whole = live.chat(**fields).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert content[0] == {
        "token": "H",
        "bytes": [72],
        "logprob": -0.072,
        "top_logprobs": [
            {"token": "H", "bytes": [72], "logprob": -0.072},
            {"token": "I", "bytes": [73], "logprob": -0.073},
            {"token": "J", "bytes": [74], "logprob": -0.074},
        ],
    }
    streamed = [
        entry
        for chunk in events(live.chat(**fields, stream=True))
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


def test_log_probs_without_alternatives(live: Live):
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        content = live.chat(**fields).json()["choices"][0]["logprobs"]["content"]
        assert content[0]["top_logprobs"] == []
    response = live.chat(top_logprobs=2)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_logprobs"


def test_characters_of_several_tokens_arrive_whole():
    text = "👨‍👩‍👧‍👦🌶️ é漢字 ďábel  two  spaces"
    engine = FakeEngine(answer=lambda prompt, sample: text)
    with Live(engine) as live:
        for interval in (1, 2, 7):
            chunks = events(live.chat(stream=True, stream_interval=interval))
            assert texts(chunks) == {0: text}
            assert not any("\N{REPLACEMENT CHARACTER}" in str(chunk) for chunk in chunks)


def test_stop_strings_never_leak(live: Live):
    for stop in ("lo wo", ["never", "lo wo"]):
        chunks = events(live.chat(stream=True, stop=stop))
        assert texts(chunks) == {0: "Hel"}
        assert chunks[-1]["choices"][0]["matched_stop"] == "lo wo"
    body = live.chat(stop="lo wo", no_stop_trim=True).json()
    assert body["choices"][0]["message"]["content"] == "Hello wo"


def test_text_parts_equal_the_plain_string(live: Live):
    plain = live.chat("what is this?").json()["usage"]["prompt_tokens"]
    parts = live.chat([{"type": "text", "text": "what is this?"}]).json()
    assert parts["usage"]["prompt_tokens"] == plain
    two = [{"type": "text", "text": "what is"}, {"type": "text", "text": "this?"}]
    assert live.chat(two).json()["usage"]["prompt_tokens"] == plain


def test_developer_means_system(live: Live):
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "be brief"}, {"role": "user", "content": "hi"}]
        live.post("/v1/chat/completions", {"messages": messages})
    first, second = live.engine.submitted[-2:]
    assert first.prompt == second.prompt


def test_a_final_message_is_continued(live: Live):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well"},
    ]
    live.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    assert bytes(live.engine.submitted[-1].prompt) == b"<user>hi\n<assistant>Well"


def test_sampling_fields_reach_the_engine(live: Live):
    live.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, frequency_penalty=1, presence_penalty=-1,
        repetition_penalty=1.5, max_completion_tokens=9, max_tokens=5, min_tokens=2, seed=42,
        stop_token_ids=[5], logit_bias={"7": 1}, ignore_eos=True, skip_special_tokens=False,
    )  # fmt: skip
    sampling = live.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        *(0.5, 0.9, 7, 0.1),
    )
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.seed) == (1.5, 42)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (9, 2)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ([5], [(7, 1.0)])
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    live.chat()
    assert live.engine.submitted[-1].sampling.max_new_tokens is None


def test_nulls_and_bookkeeping_change_nothing(live: Live):
    response = live.chat(
        temperature=None, stop=None, n=None, tools=None, tool_choice="auto", logit_bias=None,
        response_format={"type": "text"}, user="me", store=False, metadata={"a": "b"},
        service_tier="auto", parallel_tool_calls=True, lora_path=None, logprobs=False,
        stream=False, stream_options=None, top_logprobs=None, prompt_cache_key="k",
    )  # fmt: skip
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers
    assert live.chat(banana=1).headers["x-ignored-fields"] == "banana"


def test_caches_are_kept_apart_by_salt(live: Live):
    live.chat(cache_salt="a")
    assert live.engine.submitted[-1].namespace != ""


def test_a_template_that_takes_no_system_message():
    with Live(template=GEMMA2) as live:
        user = {"role": "user", "content": "hi"}
        assert live.chat(messages=[user]).status_code == 200
        response = live.chat(messages=[{"role": "system", "content": "Be kind"}, user])
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"] == "System role not supported"
        assert error["param"] == "messages"
        assert error["type"] == "invalid_request_error"


def test_a_model_without_a_template():
    with Live(template=None) as live:
        response = live.chat()
        assert response.status_code == 400
        assert "--chat-template" in response.json()["error"]["message"]
        assert live.completion().status_code == 200
