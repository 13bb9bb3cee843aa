"""A stream and a whole answer to the same request say the same, field by field."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.server.fake_engine import FakeEngine
from tests.server.joined import joined_native, joined_openai, timeless
from tests.server.live import Live
from tests.server.sse import events

from trunkline.server.config import ServerConfig

WORDS = ["é漢字", "👩‍👧", " two  spaces", "\n\n1.", "lo wo", "Hello", " ", "ab", "aab", "x"]


def answer(prompt: list[int], sample: int) -> str:
    digest = hashlib.sha256(bytes([*(one % 256 for one in prompt), sample])).digest()
    return "".join(WORDS[byte % len(WORDS)] for byte in digest[: 1 + digest[0] % 9])


def optional(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


SAMPLING = {
    "n": st.integers(1, 3),
    "stop": st.sampled_from(["lo", ["aab", "\n\n"], ["two  ", "never"]]),
    "stop_token_ids": st.just([ord("x")]),
    "no_stop_trim": st.booleans(),
    "ignore_eos": st.booleans(),
    "stream_interval": st.sampled_from([1, 2, 7]),
    "skip_special_tokens": st.booleans(),
}
TEXT = st.sampled_from(["a", "bc", "é", "the quick"])
OPENAI = {
    **SAMPLING,
    "max_tokens": st.integers(0, 40),
    "min_tokens": st.just(0),
    "rid": st.just("r"),
    "return_token_ids": st.booleans(),
    "return_prompt_token_ids": st.booleans(),
    "service_tier": st.just("auto"),
}
CHAT = optional(
    **OPENAI, logprobs=st.just(True), messages=TEXT.map(lambda t: [{"role": "user", "content": t}])
)
COMPLETION = optional(
    **OPENAI,
    logprobs=st.integers(0, 3),
    echo=st.booleans(),
    prompt=TEXT | st.lists(TEXT, min_size=1, max_size=3) | st.just([[104, 105], [106]]),
)
NATIVE = optional(
    text=TEXT | st.lists(TEXT, min_size=1, max_size=3),
    sampling_params=optional(**SAMPLING, max_new_tokens=st.integers(0, 40)),
    return_logprob=st.booleans(),
    logprob_start_len=st.integers(-1, 1),
    top_logprobs_num=st.integers(0, 2),
    token_ids_logprob=st.just([7, 9]),
    return_text_in_logprobs=st.booleans(),
    return_prompt_token_ids=st.booleans(),
)
PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(FakeEngine(answer=answer)) as server:
        yield server


def both(live: Live, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    whole = live.post(path, body)
    assert whole.status_code == 200, whole.text
    streamed = {**body, "stream": True}
    if path != "/generate":
        streamed["stream_options"] = {"include_usage": True}
    return whole.json(), events(live.post(path, streamed))


@PROPERTY
@given(CHAT)
@example({"max_tokens": 0, "return_token_ids": True})
def test_chat(live: Live, body: dict[str, Any]):
    body = {"rid": "r", "messages": [{"role": "user", "content": "hi"}], **body}
    whole, chunks = both(live, "/v1/chat/completions", body)
    assert timeless(joined_openai(chunks)) == timeless(whole)


@PROPERTY
@given(COMPLETION)
@example({"max_tokens": 0, "return_token_ids": True})
def test_completions(live: Live, body: dict[str, Any]):
    whole, chunks = both(live, "/v1/completions", {"rid": "r", "prompt": "hi", **body})
    assert timeless(joined_openai(chunks)) == timeless(whole)


@PROPERTY
@given(NATIVE)
def test_generate(live: Live, body: dict[str, Any]):
    whole, chunks = both(live, "/generate", {"rid": "r", "text": "hi", **body})
    whole = whole if isinstance(whole, list) else [whole]
    assert timeless(joined_native(chunks)) == timeless(whole)


@pytest.fixture(scope="module")
def incremental() -> Iterator[Live]:
    config = ServerConfig()
    api = replace(config.api, incremental_streaming_output=True)
    with Live(FakeEngine(answer=answer), replace(config, api=api)) as server:
        yield server


@PROPERTY
@given(NATIVE)
def test_generate_in_parts(incremental: Live, body: dict[str, Any]):
    whole, chunks = both(incremental, "/generate", {"rid": "r", "text": "hi", **body})
    whole = whole if isinstance(whole, list) else [whole]
    assert timeless(joined_native(chunks, incremental=True)) == timeless(whole)
