"""The `openai` package: models, chat, completions, responses, structured output, tools, errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

HI = [{"role": "user", "content": "Say hi."}]
NAME = "fake/model"


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=20)] | None


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="None", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> Iterator[openai.OpenAI]:
    # With a slash at the end: users write both.
    with openai.OpenAI(base_url=f"{scripted_url}/v1/", api_key="None", max_retries=0) as client:
        yield client


def test_models(scripted: openai.OpenAI) -> None:
    assert [model.id for model in scripted.models.list()] == [NAME]
    assert scripted.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as caught:
        scripted.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_chat(scripted: openai.OpenAI) -> None:
    answer = scripted.chat.completions.create(model=NAME, messages=HI, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(scripted: openai.OpenAI) -> None:
    stream = scripted.chat.completions.create(
        model=NAME, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len("Hello world") + 1


def test_the_stream_helper_accumulates(scripted: openai.OpenAI) -> None:
    with scripted.chat.completions.stream(
        model=NAME, messages=HI, n=2, logprobs=True, top_logprobs=1
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    for choice in answer.choices:
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        tokens = [one.token for one in choice.logprobs.content]
        assert "".join(tokens[: len("Hello world")]) == "Hello world"


def test_the_stream_helper_gives_what_a_whole_answer_has(client: openai.OpenAI, model: str) -> None:
    # The helper raises for answers that end by their length.
    asked = {
        **{"model": model, "messages": HI, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 2},
        "extra_body": {"regex": "(Hi|Hello) [a-z]{2,6} (there|you), [a-z]{2,6}[.!]"},
    }
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    for one, other in zip(streamed.choices, whole.choices, strict=True):
        assert one.message.content == other.message.content
        assert one.finish_reason == other.finish_reason
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.model_dump() == other.logprobs.model_dump()


def test_log_probs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HI, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for token in logprobs.content:
        assert [token.token, token.logprob] == [
            token.top_logprobs[0].token,
            token.top_logprobs[0].logprob,
        ]
        assert len(token.top_logprobs) == 3
        assert sum(math.exp(one.logprob) for one in token.top_logprobs) <= 1.0001


def test_completions(client: openai.OpenAI, model: str) -> None:
    scored = client.completions.create(
        model=model, prompt="The capital of France is", echo=True, logprobs=1, max_tokens=0
    )
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == "The capital of France is"
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "The capital of France is"
    several = client.completions.create(
        model=model, prompt=["one two", "three four"], n=2, max_tokens=2, temperature=0
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    chunks = client.completions.create(
        model=model, prompt="one two three", max_tokens=4, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    whole = client.completions.create(
        model=model, prompt="one two three", max_tokens=4, temperature=0
    )
    assert text == whole.choices[0].text


def test_token_ids_as_prompts(scripted: openai.OpenAI) -> None:
    ids = scripted.completions.create(model=NAME, prompt=[104, 105], stream=True)
    assert "".join(chunk.choices[0].text for chunk in ids) == "Hello world"
    lists = scripted.completions.create(model=NAME, prompt=[[104], [105]])
    assert [choice.text for choice in lists.choices] == ["Hello world"] * 2


def test_extra_body_and_headers(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=HI, extra_body={"top_k": 5, "regex": "(yes|no)"}
    )
    answer = raw.parse()
    assert raw.headers["x-request-id"] == answer.id
    assert answer.choices[0].message.content in ("yes", "no")


def test_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=HI, temperature=-1, stream=True)
    assert caught.value.param == "temperature"


def test_parse(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=HI, response_format=Pet, max_tokens=64
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_stream_of_structured_output(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=HI, response_format=Pet, max_tokens=64
    ) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_responses(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="Say hi.", max_output_tokens=16)
    assert answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    second = client.responses.create(
        model=model, input="Again.", previous_response_id=answer.id, max_output_tokens=16
    )
    assert second.previous_response_id == answer.id
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_response_streams(client: openai.OpenAI, model: str, scripted: openai.OpenAI) -> None:
    events = list(scripted.responses.create(model=NAME, input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello world"
    with scripted.responses.stream(model=NAME, input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello world"
    whole = client.responses.create(
        model=model, input="hi", temperature=0, max_output_tokens=16, store=False
    )
    assert whole.status in ("completed", "incomplete")


def test_answers_have_every_field_of_their_types(scripted_url: str) -> None:
    """Whole chats apart: the versions in their `metadata` are a list, which the type has not.

    So are streams of completions: finish reasons are null before the end, OpenAI's own too.
    """
    with openai.OpenAI(
        base_url=f"{scripted_url}/v1", api_key="None", _strict_response_validation=True
    ) as strict:
        strict.models.list()
        strict.models.retrieve(NAME)
        strict.completions.create(model=NAME, prompt="hi", logprobs=1)
        for stream in (
            strict.chat.completions.create(
                model=NAME, messages=HI, logprobs=True, top_logprobs=2, stream=True
            ),
            strict.responses.create(model=NAME, input="hi", stream=True),
        ):
            assert list(stream)
        answer = strict.responses.create(
            model=NAME, input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        strict.responses.retrieve(answer.id)
        strict.responses.input_items.list(answer.id)
        file = strict.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
        batch = strict.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        strict.batches.retrieve(batch.id)
        strict.batches.list()
        strict.files.list()


def _responses_format(client: openai.OpenAI, model: str) -> None:
    """Skips where `/v1/responses` says that it has no such formats."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    try:
        client.responses.create(
            model=model, input="hi", text={"format": form}, max_output_tokens=16
        )
    except openai.BadRequestError as error:
        if str(error.param).startswith("text"):
            pytest.skip(f"/v1/responses has no structured output: {error.message}")
        raise


def test_parsed_responses(client: openai.OpenAI, model: str) -> None:
    _responses_format(client, model)
    answer = client.responses.parse(
        model=model, input="Say hi.", text_format=Pet, max_output_tokens=64
    )
    assert isinstance(answer.output_parsed, Pet)
    with client.responses.stream(
        model=model, input="Say hi.", text_format=Pet, max_output_tokens=64
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Pet)


def test_async(scripted_url: str) -> None:
    async def use() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{scripted_url}/v1", api_key="None") as client:
            whole, stream = await asyncio.gather(
                client.chat.completions.create(model=NAME, messages=HI),
                client.chat.completions.create(model=NAME, messages=HI, stream=True),
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            response = await client.responses.create(model=NAME, input="hi")
            async with client.chat.completions.stream(model=NAME, messages=HI) as helper:
                final = await helper.get_final_completion()
            models = [model.id async for model in client.models.list()]
            assert models == [NAME]
            return [
                whole.choices[0].message.content or "",
                text,
                response.output_text,
                final.choices[0].message.content or "",
            ]

    assert asyncio.run(use()) == ["Hello world"] * 4


@pytest.mark.usefixtures("tools")
class TestTools:
    """Held to a grammar, so that any model complies."""

    @pytest.mark.parametrize("choice", ["required", "named"])
    def test_whole(self, client: openai.OpenAI, model: str, choice: str) -> None:
        tool = openai.pydantic_function_tool(Pet)
        named = {"type": "function", "function": {"name": "Pet"}}
        answer = client.chat.completions.parse(
            model=model,
            messages=HI,
            tools=[tool],
            tool_choice=named if choice == "named" else "required",
            parallel_tool_calls=False,
            max_tokens=128,
            temperature=0,
        )
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert calls is not None
        assert [call.function.name for call in calls] == ["Pet"]
        assert isinstance(calls[0].function.parsed_arguments, Pet)

    def test_streamed(self, client: openai.OpenAI, model: str) -> None:
        asked = {
            "model": model,
            "messages": HI,
            "tools": [openai.pydantic_function_tool(Pet)],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 128,
            "temperature": 0,
        }
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion().choices[0]
        whole = client.chat.completions.create(**asked).choices[0]
        assert "tool_calls.function.arguments.done" in kinds
        assert streamed.finish_reason == whole.finish_reason == "tool_calls"
        assert [call.function.arguments for call in streamed.message.tool_calls or []] == [
            call.function.arguments for call in whole.message.tool_calls or []
        ]

    def test_results_go_back(self, client: openai.OpenAI, model: str) -> None:
        tools = [openai.pydantic_function_tool(Pet)]
        first = client.chat.completions.create(
            model=model, messages=HI, tools=tools, tool_choice="required", max_tokens=128
        )
        message = first.choices[0].message
        assert message.tool_calls
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"found": True})}
            for call in message.tool_calls
        ]
        second = client.chat.completions.create(
            model=model, messages=[*HI, message, *results], tools=tools, max_tokens=8
        )
        assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.usefixtures("responses_tools")
def test_responses_with_tools(client: openai.OpenAI, model: str) -> None:
    tool = openai.pydantic_function_tool(Pet)["function"]
    tools = [{"type": "function", "name": "Pet", "strict": True, "parameters": tool["parameters"]}]
    first = client.responses.create(
        model=model, input="hi", tools=tools, tool_choice="required", max_output_tokens=128
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    Pet.model_validate_json(calls[0].arguments)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        for call in calls
    ]
    second = client.responses.create(
        model=model,
        input=results,
        previous_response_id=first.id,
        tools=tools,
        max_output_tokens=16,
    )
    assert second.status in ("completed", "incomplete")


def test_the_documented_program(run_documented: Callable[[str], str]) -> None:
    assert "name=" in run_documented("openai")
