"""`langchain-openai`: chat, streams, completions, structured output, tools, responses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=20)]


@tool
def look_up(kind: Literal["cat", "dog"]) -> str:
    """Look up a pet."""
    return f"a {kind}"


@pytest.fixture
def options(url: str, model: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "None", "model": model, "temperature": 0}


@pytest.fixture
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**options, max_tokens=64, max_retries=0)


@pytest.fixture
def scripted(scripted_url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{scripted_url}/v1", api_key="None", model="fake/model")


def test_invoke(scripted: ChatOpenAI) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the package dumps answers by their types
        answer = scripted.invoke("hi")
    assert answer.content == "Hello world"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len("Hello world") + 1
    assert answer.response_metadata["finish_reason"] == "stop"


def test_stream_and_batch(scripted: ChatOpenAI) -> None:
    chunks = list(scripted.stream("hi"))
    assert "".join(str(chunk.content) for chunk in chunks) == "Hello world"
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert len(usage) <= 1
    assert [answer.content for answer in scripted.batch(["a", "b"])] == ["Hello world"] * 2


def test_log_probs(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke("hi")
    assert len(answer.response_metadata["logprobs"]["content"]) == 3


def test_completions(options: dict[str, Any]) -> None:
    assert OpenAI(**options, max_tokens=4).invoke("The capital of France is")
    assert "".join(OpenAI(**options, max_tokens=4).stream("The capital of France is"))


@pytest.mark.parametrize("strict", [True, False])
def test_json_schema(chat: ChatOpenAI, strict: bool) -> None:
    asked = chat.with_structured_output(Pet, method="json_schema", strict=strict)
    assert isinstance(asked.invoke("A cat of three."), Pet)


def test_json_mode(chat: ChatOpenAI) -> None:
    """Any object; a schema for it is in nobody's hands but the model's."""
    asked = chat.bind(response_format={"type": "json_object"}, max_tokens=512)
    answer = asked.invoke("Answer with an empty object.")
    assert str(answer.content).lstrip().startswith("{")


def test_responses(scripted_url: str) -> None:
    chat = ChatOpenAI(
        base_url=f"{scripted_url}/v1", api_key="None", model="fake/model", use_responses_api=True
    )
    assert chat.invoke("hi").text == "Hello world"
    assert "".join(chunk.text for chunk in chat.stream("hi")) == "Hello world"


@pytest.mark.usefixtures("tools")
class TestTools:
    def test_function_calling(self, chat: ChatOpenAI) -> None:
        asked = chat.with_structured_output(Pet, method="function_calling")
        assert isinstance(asked.invoke("A cat of three."), Pet)

    def test_bound_tools(self, chat: ChatOpenAI) -> None:
        asked = chat.bind_tools([look_up], tool_choice="any", parallel_tool_calls=False)
        question = HumanMessage("A cat.")
        answer = asked.invoke([question])
        [call] = answer.tool_calls
        assert call["name"] == "look_up"
        assert call["args"]["kind"] in ("cat", "dog")
        result = ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"])
        again = chat.bind_tools([look_up]).invoke([question, answer, result])
        assert again.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")

    def test_streamed(self, chat: ChatOpenAI) -> None:
        asked = chat.bind_tools([look_up], tool_choice="look_up", parallel_tool_calls=False)
        whole = None
        for chunk in asked.stream("A cat."):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        [call] = whole.tool_calls
        assert call["args"]["kind"] in ("cat", "dog")


def test_the_documented_program(run_documented: Callable[[str], str]) -> None:
    assert "Paris" in run_documented("langchain")
