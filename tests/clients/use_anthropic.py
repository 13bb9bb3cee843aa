"""The `anthropic` package: messages, streams, token counts, tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anthropic
import pytest

HI = [{"role": "user", "content": "Say hi."}]
NAME = "fake/model"
TOOL = {
    "name": "look_up",
    "description": "Look up a pet.",
    "input_schema": {
        "type": "object",
        "properties": {"kind": {"type": "string", "enum": ["cat", "dog"]}},
        "required": ["kind"],
    },
}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="None", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted_url, api_key="None", max_retries=0) as client:
        yield client


def test_messages(scripted: anthropic.Anthropic) -> None:
    answer = scripted.messages.create(model=NAME, max_tokens=64, system="Be short.", messages=HI)
    assert [block.text for block in answer.content if block.type == "text"] == ["Hello world"]
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == len("Hello world") + 1


def test_stream(scripted: anthropic.Anthropic) -> None:
    with scripted.messages.stream(model=NAME, max_tokens=64, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello world"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len("Hello world") + 1
    raw = list(scripted.messages.create(model=NAME, max_tokens=64, messages=HI, stream=True))
    assert (raw[0].type, raw[-1].type) == ("message_start", "message_stop")


def test_beta(scripted: anthropic.Anthropic) -> None:
    """Sent with a query string, which changes nothing."""
    answer = scripted.beta.messages.create(model=NAME, max_tokens=64, messages=HI)
    assert answer.content[0].type == "text"


def test_count_tokens(client: anthropic.Anthropic, model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=HI).input_tokens
    answer = client.messages.create(model=model, max_tokens=4, messages=HI)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted
    assert answer.stop_reason == "max_tokens"


def test_errors(client: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=4, messages=HI)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=model, max_tokens=0, messages=HI)


@pytest.mark.usefixtures("messages_tools")
def test_tools(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.create(
        model=model, max_tokens=128, messages=HI, tools=[TOOL], tool_choice={"type": "any"}
    )
    [call, *_] = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert call.input["kind"] in ("cat", "dog")
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "found"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    turns = [
        *HI,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    with client.messages.stream(model=model, max_tokens=8, messages=turns, tools=[TOOL]) as stream:
        assert stream.get_final_message().usage.output_tokens > 0


def test_the_documented_program(run_documented: Callable[[str], str]) -> None:
    assert "Paris" in run_documented("anthropic")
