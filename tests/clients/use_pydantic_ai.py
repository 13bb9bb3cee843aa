"""`pydantic-ai`: agents with text, native output, tool output and tools; responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

SHORT = ModelSettings(max_tokens=128, temperature=0)


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=20)]


def chat(url: str, name: str) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="None"))


def test_text(scripted_url: str) -> None:
    answer = Agent(chat(scripted_url, "fake/model"), instructions="Be short.").run_sync("hi")
    assert answer.output == "Hello world"


def test_stream(scripted_url: str) -> None:
    async def use() -> str:
        async with Agent(chat(scripted_url, "fake/model")).run_stream("hi") as stream:
            return "".join([text async for text in stream.stream_text(delta=True)])

    assert asyncio.run(use()) == "Hello world"


def test_responses(scripted_url: str) -> None:
    provider = OpenAIProvider(base_url=f"{scripted_url}/v1", api_key="None")
    answer = Agent(OpenAIResponsesModel("fake/model", provider=provider)).run_sync("hi")
    assert answer.output == "Hello world"


def test_native_output(url: str, model: str) -> None:
    agent = Agent(chat(url, model), output_type=NativeOutput(Pet), retries=0)
    answer = agent.run_sync("A cat of three.", model_settings=SHORT)
    assert isinstance(answer.output, Pet)


@pytest.mark.usefixtures("tools")
class TestTools:
    def test_tool_output(self, url: str, model: str) -> None:
        agent = Agent(chat(url, model), output_type=Pet, retries=0)
        answer = agent.run_sync("A cat of three.", model_settings=SHORT)
        assert isinstance(answer.output, Pet)

    def test_streamed_tool_output(self, url: str, model: str) -> None:
        async def use() -> Pet:
            agent = Agent(chat(url, model), output_type=Pet, retries=0)
            async with agent.run_stream("A cat.", model_settings=SHORT) as stream:
                return await stream.get_output()

        assert isinstance(asyncio.run(use()), Pet)

    def test_a_tool(self, url: str, model: str) -> None:
        """The tool is there in the first turn and alone; its result goes back to the model."""
        seen = []

        async def first_turn(
            context: RunContext[None], tools: list[ToolDefinition]
        ) -> list[ToolDefinition]:
            return tools if context.run_step == 1 else []

        async def later_turns(
            context: RunContext[None], tools: list[ToolDefinition]
        ) -> list[ToolDefinition]:
            return tools if context.run_step > 1 else []

        agent = Agent(
            chat(url, model),
            output_type=Pet,
            retries=0,
            capabilities=[PrepareTools(first_turn), PrepareOutputTools(later_turns)],
        )

        @agent.tool_plain
        def look_up(kind: Literal["cat", "dog"]) -> str:
            """Look up a pet."""
            seen.append(kind)
            return f"a {kind}, three years old"

        settings = ModelSettings(**SHORT, parallel_tool_calls=False)
        answer = agent.run_sync("A cat of three.", model_settings=settings)
        assert isinstance(answer.output, Pet)
        assert len(seen) == 1


def test_the_documented_program(run_documented: Callable[[str], str]) -> None:
    assert "name=" in run_documented("pydantic-ai")
