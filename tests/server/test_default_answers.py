"""/v1/responses and /v1/messages with the default model, through the packages of their makers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from tests.server.process import KEY, Process

QUESTION = "What is the capital of France?"
MODEL = "default"


@pytest.fixture(scope="module")
def client(default_server: Process) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{default_server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def messages(default_server: Process) -> Iterator[Any]:
    url = f"http://127.0.0.1:{default_server.port}"
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client.messages


def test_all_families_give_the_same_answer(client: openai.OpenAI, messages: Any) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
    )
    answer = client.responses.create(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24
    )
    message = messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=24,
        extra_body={"temperature": 0},
    )
    assert "Paris" in answer.output_text
    text = chat.choices[0].message.content
    assert answer.output_text == message.content[0].text == text
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    cached = message.usage.cache_read_input_tokens
    assert cached > 0
    assert message.usage.input_tokens + cached == chat.usage.prompt_tokens


def test_conversations_use_the_cache(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
    first = client.responses.create(input=QUESTION, **fields)
    with client.responses.stream(
        input="And of Italy?", previous_response_id=first.id, **fields
    ) as stream:
        text = "".join(event.delta for event in stream if event.type.endswith("text.delta"))
        second = stream.get_final_response()
    assert second.output_text == text != ""
    known = first.usage.total_tokens - 1
    assert second.usage.input_tokens > known
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_background_and_log_probs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}
    fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = client.responses.create(input=QUESTION, background=True, **fields)
    while answer.status in ("queued", "in_progress"):
        answer = client.responses.retrieve(answer.id)
    whole = client.responses.create(input=QUESTION, **fields)
    assert answer.status == whole.status == "incomplete"
    [row], [other] = answer.output[0].content, whole.output[0].content
    assert row.to_dict() == other.to_dict()
    assert len(row.logprobs) == 4
    assert all(entry.logprob <= 0 for entry in row.logprobs)


def test_messages_in_a_stream(messages: Any) -> None:
    history: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    count = messages.count_tokens(model=MODEL, messages=history).input_tokens
    with messages.stream(
        model=MODEL,
        max_tokens=12,
        messages=history,
        stop_sequences=["."],
        extra_body={"temperature": 0},
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text.startswith(" Paris")
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", ".")
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == count
