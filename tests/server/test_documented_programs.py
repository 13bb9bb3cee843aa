"""The documented programs for chat, streaming, completions and stop, as users copy them."""

from collections.abc import Iterator

import openai
import pytest
from tests.server.live import MODEL, Live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.Client]:
    with openai.Client(base_url=f"{live.url}/v1", api_key="None") as client:
        yield client


def test_waiting_for_the_server(live: Live):
    headers = {"authorization": "Bearer None"}
    assert live.http.get("/v1/models", headers=headers).status_code == 200


def test_chat_completions(client: openai.Client):
    response = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "List 3 countries and their capitals."},
        ],
        temperature=0,
        max_tokens=64,
    )
    shown = f"Response: {response}"
    assert shown.startswith("Response: ChatCompletion(id='")
    assert "matched_stop=256" in shown


def test_chat_parameters(client: openai.Client, live: Live):
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
    assert response.choices[0].message.content == "Hello world"
    sampling = live.engine.submitted[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.2, 0.2, 42)


def test_streaming(client: openai.Client, capsys: pytest.CaptureFixture[str]):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices[0].delta.content is not None:
            print(chunk.choices[0].delta.content, end="")
    assert capsys.readouterr().out == "Hello world"


def test_completions(client: openai.Client):
    response = client.completions.create(
        model=MODEL,
        prompt="List 3 countries and their capitals.",
        temperature=0,
        max_tokens=64,
        n=1,
        stop=None,
    )
    assert f"{response}".startswith("Completion(id='")
    assert response.object == "text_completion"


def test_completion_parameters(client: openai.Client, live: Live):
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
    assert response.choices[0].text == "Hello world"
    assert live.engine.submitted[-1].sampling.stop == ["\n\n", "THE END"]
