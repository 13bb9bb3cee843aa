"""The `openai` package, unchanged, against a live server."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from tests.server.fake_engine import FakeEngine
from tests.server.live import MODEL, Live

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="None", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=2, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert answer.choices[0].matched_stop == 256


def test_strict_validation_of_responses(live: Live):
    """Not for whole chat answers: their `metadata.weight_versions` is a list, SGLang's way."""
    strict = openai.OpenAI(
        base_url=f"{live.url}/v1/", api_key="None", _strict_response_validation=True
    )
    with strict as client:
        client.models.list()
        client.completions.create(model=MODEL, prompt="hi", logprobs=1)
        for chunk in client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, top_logprobs=2, stream=True
        ):
            assert chunk.object == "chat.completion.chunk"


def test_chat_stream(client: openai.OpenAI):
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "Hello world"


def test_the_stream_helper_accumulates(client: openai.OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=HI, n=2) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    for choice in answer.choices:
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
        assert choice.finish_reason == "stop"


def test_completions(client: openai.OpenAI):
    answer = client.completions.create(
        model=MODEL, prompt="hi", echo=True, logprobs=1, max_tokens=0
    )
    assert answer.choices[0].text == "hi"
    chunks = client.completions.create(model=MODEL, prompt=[104, 105], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"


def test_extra_body_and_raw_response(client: openai.OpenAI, live: Live):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert raw.headers["x-request-id"] == raw.parse().id
    assert live.engine.submitted[-1].sampling.top_k == 5


def test_error_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1, stream=True)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HI)
    assert missing.value.code == "model_not_found"


def test_an_error_in_a_stream_is_raised():
    with Live(FakeEngine(fail_after=3, delay_s=0.005)) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="None", max_retries=0)
        with client, pytest.raises(openai.APIError, match="logits are not finite"):
            for _ in client.chat.completions.create(model=MODEL, messages=HI, stream=True):
                pass


def test_many_at_once():
    async def work(url: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="None") as client:
            calls = [
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": str(number)}]
                )
                for number in range(50)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    engine = FakeEngine(answer=lambda prompt, sample: bytes(prompt).decode().splitlines()[0])
    with Live(engine) as live:
        assert asyncio.run(work(live.url)) == [f"<user>{number}" for number in range(50)]
        assert live.server.in_flight == 0
