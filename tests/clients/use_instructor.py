"""`instructor`: its modes for JSON, schemas and tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

HI = [{"role": "user", "content": "A cat of three."}]


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=20)]


def make(url: str, mode: instructor.Mode) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="None", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def test_json_schema(url: str, model: str) -> None:
    client = make(url, instructor.Mode.JSON_SCHEMA)
    pet = client.chat.completions.create(
        model=model, messages=HI, response_model=Pet, max_retries=0, max_tokens=64
    )
    assert isinstance(pet, Pet)


def test_json(url: str, model: str) -> None:
    """Only some object is asked of the server here: what is in it is the model's choice."""

    class Anything(BaseModel):
        kind: Any = None

    client = make(url, instructor.Mode.JSON)
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Answer with an empty object."}],
        response_model=Anything,
        max_retries=0,
        max_tokens=512,
        temperature=0,
    )
    assert isinstance(answer, Anything)


def test_partial_stream(url: str, model: str) -> None:
    client = make(url, instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model=model, messages=HI, response_model=Pet, max_retries=0, max_tokens=64
        )
    )
    assert parts[-1].kind in ("cat", "dog")


@pytest.mark.usefixtures("tools")
class TestTools:
    @pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT"])
    def test_whole(self, url: str, model: str, mode: str) -> None:
        client = make(url, instructor.Mode[mode])
        pet = client.chat.completions.create(
            model=model, messages=HI, response_model=Pet, max_retries=0, max_tokens=128
        )
        assert isinstance(pet, Pet)

    def test_partial_stream(self, url: str, model: str) -> None:
        client = make(url, instructor.Mode.TOOLS)
        parts = list(
            client.chat.completions.create_partial(
                model=model, messages=HI, response_model=Pet, max_retries=0, max_tokens=128
            )
        )
        assert parts[-1].kind in ("cat", "dog")


def test_the_documented_program(run_documented: Callable[[str], str]) -> None:
    assert run_documented("instructor").strip()
