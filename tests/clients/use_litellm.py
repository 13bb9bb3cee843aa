"""`litellm`: its providers for servers of OpenAI's API, responses and structured output."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import litellm
import pytest
from pydantic import BaseModel, Field

HI = [{"role": "user", "content": "A cat of three."}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=20)]


@pytest.fixture
def to_model(url: str) -> dict[str, Any]:
    return {"api_base": f"{url}/v1", "api_key": "None", "max_tokens": 64}


@pytest.fixture
def to_script(scripted_url: str) -> dict[str, Any]:
    return {"api_base": f"{scripted_url}/v1", "api_key": "None", "messages": HI}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chat(to_script: dict[str, Any], provider: str) -> None:
    name = f"{provider}/fake/model"
    answer = litellm.completion(model=name, **to_script)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.usage.completion_tokens == len("Hello world") + 1
    stream = litellm.completion(
        model=name, stream=True, stream_options={"include_usage": True}, **to_script
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello world"
    built = litellm.stream_chunk_builder(chunks, messages=HI)
    assert built.usage.completion_tokens == len("Hello world") + 1


def test_completions(to_script: dict[str, Any]) -> None:
    options = {key: value for key, value in to_script.items() if key != "messages"}
    answer = litellm.text_completion(
        model="text-completion-openai/fake/model", prompt="hi", **options
    )
    assert answer.choices[0].text == "Hello world"


def test_responses(to_script: dict[str, Any]) -> None:
    options = {key: value for key, value in to_script.items() if key != "messages"}
    answer = litellm.responses(model="openai/fake/model", input="hi", **options)
    assert answer.output[0].content[0].text == "Hello world"


def test_structured_output(to_model: dict[str, Any], model: str) -> None:
    answer = litellm.completion(
        model=f"hosted_vllm/{model}", messages=HI, response_format=Pet, **to_model
    )
    Pet.model_validate_json(answer.choices[0].message.content)


@pytest.mark.usefixtures("tools")
def test_tools(to_model: dict[str, Any], model: str) -> None:
    tool = {
        "type": "function",
        "function": {"name": "pet", "parameters": Pet.model_json_schema()},
    }
    asked = {"messages": HI, "tools": [tool], "tool_choice": "required", **to_model}
    answer = litellm.completion(model=f"hosted_vllm/{model}", **asked)
    calls = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "pet"
    Pet.model_validate_json(calls[0].function.arguments)
    stream = litellm.completion(model=f"hosted_vllm/{model}", stream=True, **asked)
    built = litellm.stream_chunk_builder(list(stream), messages=HI)
    json.loads(built.choices[0].message.tool_calls[0].function.arguments)


def test_the_documented_program(run_documented: Callable[[str], str]) -> None:
    assert "Paris" in run_documented("litellm")
