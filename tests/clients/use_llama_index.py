"""`llama-index-llms-openai-like`: chat, complete, streams, structured output, tools.

Annotations are real ones here: the package makes schemas of them.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

HI = [ChatMessage(role="user", content="A cat of three.")]


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=20)]


def look_up(kind: Literal["cat", "dog"]) -> str:
    """Look up a pet."""
    return kind


def make(url: str, model: str, **options: Any) -> OpenAILike:
    return OpenAILike(
        api_base=f"{url}/v1",
        api_key="None",
        model=model,
        context_window=2048,
        max_retries=0,
        **{"is_chat_model": True, "max_tokens": 64, **options},
    )


@pytest.fixture
def scripted(scripted_url: str) -> OpenAILike:
    return make(scripted_url, "fake/model")


def test_chat(scripted: OpenAILike) -> None:
    assert scripted.chat(HI).message.content == "Hello world"
    *_, last = scripted.stream_chat(HI)
    assert last.message.content == "Hello world"


def test_complete(scripted: OpenAILike, scripted_url: str) -> None:
    assert scripted.complete("hi").text == "Hello world"
    completing = make(scripted_url, "fake/model", is_chat_model=False)
    assert completing.complete("hi").text == "Hello world"
    *_, last = completing.stream_complete("hi")
    assert last.text == "Hello world"


def test_structured_output(url: str, model: str) -> None:
    llm = make(url, model, should_use_structured_outputs=True)
    assert isinstance(llm.structured_predict(Pet, PromptTemplate("A cat of three.")), Pet)


@pytest.mark.usefixtures("tools")
class TestTools:
    def test_structured_output(self, url: str, model: str) -> None:
        llm = make(url, model, is_function_calling_model=True)
        assert isinstance(llm.structured_predict(Pet, PromptTemplate("A cat of three.")), Pet)

    def test_calls(self, url: str, model: str) -> None:
        llm = make(url, model, is_function_calling_model=True)
        answer = llm.chat_with_tools(
            [FunctionTool.from_defaults(look_up)], user_msg="A cat.", tool_required=True
        )
        calls = llm.get_tool_calls_from_response(answer)
        assert calls
        assert {call.tool_name for call in calls} == {"look_up"}
        assert calls[0].tool_kwargs["kind"] in ("cat", "dog")


def test_the_documented_program(run_documented: Callable[[str], str]) -> None:
    assert "Paris" in run_documented("llama-index")
