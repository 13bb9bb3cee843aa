"""The documented programs for chat, streaming, completions and stop, as users copy them.

They are those of the page "OpenAI APIs - Completions" of SGLang's documentation (December 2024),
unchanged but for the name of the model, against a real server with the default model.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests.server.process import Process

from trunkline.engine.weights.default_model import DEFAULT_MODEL

MODEL = DEFAULT_MODEL.name


@pytest.fixture(scope="module")
def client(default_server: Process) -> Iterator[openai.Client]:
    url = f"http://127.0.0.1:{default_server.port}/v1"
    with openai.Client(base_url=url, api_key="None") as client:
        yield client


def print_highlight(text: str) -> None:
    print(text)


def test_waiting_for_the_server(default_server: Process) -> None:
    headers = {"authorization": "Bearer None"}
    assert default_server.http.get("/v1/models", headers=headers).status_code == 200


def test_chat_completions(client: openai.Client, capsys: pytest.CaptureFixture[str]) -> None:
    response = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "List 3 countries and their capitals."},
        ],
        temperature=0,
        max_tokens=64,
    )

    print_highlight(f"Response: {response}")

    shown = capsys.readouterr().out
    assert shown.startswith("Response: ChatCompletion(id='")
    assert "matched_stop=" in shown
    content = response.choices[0].message.content
    assert content is not None
    assert "1." in content
    assert response.usage is not None
    assert 0 < response.usage.completion_tokens <= 64


def test_chat_parameters(client: openai.Client, capsys: pytest.CaptureFixture[str]) -> None:
    response = client.chat.completions.create(
        model=MODEL,
        messages=[
            {
                "role": "system",
                "content": "You are a knowledgeable historian who provides concise responses.",
            },
            {"role": "user", "content": "Tell me about ancient Rome"},
            {
                "role": "assistant",
                "content": "Ancient Rome was a civilization centered in Italy.",
            },
            {"role": "user", "content": "What were their major achievements?"},
        ],
        temperature=0.3,  # Lower temperature for more focused responses
        max_tokens=128,  # Reasonable length for a concise response
        top_p=0.95,  # Slightly higher for better fluency
        presence_penalty=0.2,  # Mild penalty to avoid repetition
        frequency_penalty=0.2,  # Mild penalty for more natural language
        n=1,  # Single response is usually more stable
        seed=42,  # Keep for reproducibility
    )

    print_highlight(response.choices[0].message.content)  # type: ignore[arg-type]

    assert "Rom" in capsys.readouterr().out


def test_streaming(client: openai.Client, capsys: pytest.CaptureFixture[str]) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices[0].delta.content is not None:
            print(chunk.choices[0].delta.content, end="")

    assert capsys.readouterr().out.strip()
    assert chunk.choices[0].finish_reason in ("stop", "length")


def test_completions(client: openai.Client, capsys: pytest.CaptureFixture[str]) -> None:
    response = client.completions.create(
        model=MODEL,
        prompt="List 3 countries and their capitals.",
        temperature=0,
        max_tokens=64,
        n=1,
        stop=None,
    )

    print_highlight(f"Response: {response}")

    assert capsys.readouterr().out.startswith("Response: Completion(id='")
    assert response.object == "text_completion"
    assert response.choices[0].text


def test_completion_parameters(client: openai.Client, capsys: pytest.CaptureFixture[str]) -> None:
    response = client.completions.create(
        model=MODEL,
        prompt="Write a short story about a space explorer.",
        temperature=0.7,  # Moderate temperature for creative writing
        max_tokens=150,  # Longer response for a story
        top_p=0.9,  # Balanced diversity in word choice
        stop=["\n\n", "THE END"],  # Multiple stop sequences
        presence_penalty=0.3,  # Encourage novel elements
        frequency_penalty=0.3,  # Reduce repetitive phrases
        n=1,  # Generate one completion
        seed=123,  # For reproducible results
    )

    print_highlight(f"Response: {response}")

    shown = capsys.readouterr().out
    [choice] = response.choices
    assert "\n\n" not in choice.text
    assert "THE END" not in choice.text
    if choice.finish_reason == "stop":
        assert f"matched_stop={choice.matched_stop!r}" in shown  # type: ignore[attr-defined]
    else:
        assert response.usage is not None
        assert response.usage.completion_tokens == 150
