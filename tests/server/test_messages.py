"""/v1/messages and count_tokens: Anthropic's shapes, over a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from tests.server.fake_engine import FakeEngine
from tests.server.live import MODEL, Live
from tests.server.test_responses import TOOL_TEMPLATE, prompt

from trunkline.engine.messages import Refused
from trunkline.server.config import HttpOptions, ServerConfig

HI: list[Any] = [{"role": "user", "content": "hi"}]


def message(live: Live, messages: Any = HI, **fields: Any) -> httpx.Response:
    return live.post("/v1/messages", {"messages": messages, "max_tokens": 200, **fields})


def message_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types and whose order is right."""
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[1]) == ("message_start", "ping")
    assert kinds[-2:] == ["message_delta", "message_stop"]
    started = -1
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            started += 1
        assert event["index"] == started
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == started + 1
    return events


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=live.url, api_key="None", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_the_answer_has_exactly_these_rows(live: Live):
    body = message(live, system="be brief").json()
    assert body.pop("id").startswith("msg_")
    tokens = len("<system>be brief\n<user>hi\n<assistant>")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "default",
        "content": [{"type": "text", "text": "Hello world", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": tokens - tokens // 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": tokens // 2,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 12,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }


def test_streams(live: Live):
    events = message_events(message(live, stream=True))
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == len("<user>hi\n<assistant>")
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == "Hello world"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, "Hel"),
        ({"stop_sequences": ["never", "lo wo"]}, "stop_sequence", "lo wo", "Hel"),
        ({"stop_token_ids": [108]}, "end_turn", None, "Hel"),
        ({"max_tokens": 9999, "ignore_eos": True}, "model_context_window_exceeded", None, None),
    ],
)
def test_stop_reasons(
    live: Live, fields: dict[str, Any], reason: str, sequence: str | None, text: str | None
):
    body = message(live, **fields).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert text is None or body["content"][0]["text"] == text
    events = message_events(message(live, **fields, stream=True))
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_without_text_is_an_empty_block():
    with Live(FakeEngine(answer=lambda prompt, sample: "")) as live:
        assert message(live).json()["content"][0]["text"] == ""
        message_events(message(live, stream=True))


def test_aborted_messages_pause():
    with Live(FakeEngine(delay_s=0.02)) as live:
        fields = {"messages": HI, "max_tokens": 400, "ignore_eos": True, "rid": "r"}
        with live.http.stream("POST", "/v1/messages", json={**fields, "stream": True}) as response:
            chunks = response.iter_text()
            next(chunks)
            live.post("/abort_request", {"rid": "r"})
            assert '"stop_reason":"pause_turn"' in "".join(chunks)


def test_blocks_become_text(live: Live):
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    history = [
        {"role": "user", "content": blocks},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    assert message(live, history, system=blocks).status_code == 200
    assert prompt(live) == "<system>a\nb\n<user>a\nb\nc\n<assistant>d\n<user>e\n<assistant>"


def test_the_assistants_last_words_are_continued(live: Live):
    assert message(live, [*HI, {"role": "assistant", "content": "Well"}]).status_code == 200
    assert prompt(live) == "<user>hi\n<assistant>Well"


def test_calls_results_and_thoughts_of_the_history():
    history = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "look", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "c1", "name": "get", "input": {"at": "Zürich"}},
                {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "noon"}],
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    with Live(template=TOOL_TEMPLATE) as live:
        fields = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
        assert message(live, history, **fields).status_code == 200
        assert prompt(live) == (
            "<user>weather?\n"
            '<assistant>(look)Looking.[c1 get {"at": "Zürich"}][c2 now {}]\n'
            "<tool c1 get>rain\n<tool c2 now>noon\n<user>and?\neffort lowthink False"
        )


def test_tokens_are_counted(live: Live, client: anthropic.Anthropic):
    submitted = len(live.engine.submitted)
    count = client.messages.count_tokens(model=MODEL, messages=HI, system="x")
    assert count.input_tokens == len("<system>x\n<user>hi\n<assistant>")
    long = [{"role": "user", "content": "x" * 5000}]
    body = live.post("/v1/messages/count_tokens", {"messages": long}).json()
    assert body == {"input_tokens": 5000 + len("<user>\n<assistant>")}
    assert len(live.engine.submitted) == submitted
    response = live.post("/v1/messages/count_tokens", {"messages": []})
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_package(client: anthropic.Anthropic):
    answer = client.messages.create(
        model=MODEL, max_tokens=99, messages=HI, system="x", metadata={"user_id": "me"},
        stop_sequences=["zz"], service_tier="auto", extra_body={"top_k": 5, "temperature": 0.5},
    )  # fmt: skip
    assert answer.content[0].text == "Hello world"
    assert answer.usage.cache_read_input_tokens > 0
    with client.messages.stream(model=MODEL, max_tokens=99, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello world"
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == ("Hello world", "end_turn")
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == 20
    raw = client.messages.with_raw_response.create(model=MODEL, max_tokens=9, messages=HI)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    events = client.messages.create(model=MODEL, max_tokens=99, messages=HI, stream=True)
    assert next(event.type for event in events) == "message_start"


def test_many_at_once(live: Live):
    async def work() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=live.url, auth_token="None") as client:
            calls = [
                client.messages.create(model=MODEL, max_tokens=99, messages=HI) for _ in range(20)
            ]
            answers = await asyncio.gather(*calls)
            async with client.messages.stream(model=MODEL, max_tokens=99, messages=HI) as stream:
                last = await stream.get_final_text()
            return [*(answer.content[0].text for answer in answers), last]

    assert asyncio.run(work()) == ["Hello world"] * 21


def test_error_classes(client: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model=MODEL, max_tokens=9, messages=HI, extra_body={"temperature": -1}
        )
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in caught.value.body["error"]["message"]
    assert caught.value.request_id is not None
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=9, messages=HI)
    assert missing.value.body["error"]["type"] == "not_found_error"


def test_errors_of_all_layers(live: Live):
    cases = [
        (live.post("/v1/messages", {"messages": HI}), 400, "invalid_request_error"),
        (live.http.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (live.http.get("/v1/messages"), 405, "invalid_request_error"),
        (live.post("/v1/messages/banana", {}), 404, "not_found_error"),
    ]
    for response, status, kind in cases:
        assert response.status_code == status
        assert len(response.content) == int(response.headers["content-length"])
        body = response.json()
        assert list(body) == ["type", "error"]
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["error"]["message"]


def test_refusals_and_failures():
    refused = Refused(0, 503, "queue_full", "the queue is full", None)
    with Live(FakeEngine(refuse=refused)) as live:
        for stream in (False, True):
            response = message(live, stream=stream)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "overloaded_error"
    with Live(FakeEngine(fail_after=3, delay_s=0.005)) as live:
        assert message(live).json() == {
            "type": "error",
            "error": {"type": "api_error", "message": "logits are not finite"},
        }
        client = anthropic.Anthropic(base_url=live.url, api_key="None", max_retries=0)
        with client, pytest.raises(anthropic.APIStatusError, match="logits are not finite"):
            for _ in client.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=True):
                pass


def test_keys():
    config = ServerConfig(http=HttpOptions(api_key=("secret",)))
    with Live(config=config) as live:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert message(live).status_code == 401
            body = {"messages": HI, "max_tokens": 9}
            assert live.post("/v1/messages", body, headers=headers).status_code == 200
            assert live.http.get("/v1/models", headers=headers).status_code == 200
        for headers in (
            {},
            {"x-api-key": "wrong"},
            {"x-api-key": ""},
            {"x-api-key": "secret", "authorization": "Bearer wrong"},
        ):
            response = live.post("/v1/messages", body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=live.url, api_key="secret") as client:
            client.messages.create(model=MODEL, max_tokens=9, messages=HI)


TOOL = {"name": "f", "input_schema": {"type": "object"}}
FORMAT = {"type": "json_schema", "schema": {}}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages must have at least one entry"),
        ({"messages": [5]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (block(type="image", source={}), "'image'"),
        (block(type="text"), "messages[0].content[0].text"),
        (block(type="tool_use", id="a", name="b", input={}), "'tool_use'"),
        (block(type="tool_result", tool_use_id="a"), "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages[0].content[0].name",
        ),
        (
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    },
                ]
            },
            "tool_result",
        ),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "roles must alternate"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context length"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"max_tokens": None}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences strings must have 1 to 1024 characters"),
        ({"stop_sequences": 5}, "stop_sequences must be"),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "stop and stop_sequences"),
        ({"n": 2}, "n is not supported"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "banana"}}, "thinking.type"),
        ({"thinking": 5}, "thinking"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
            "tools[0].input_schema.type must be",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": 5}, "tools must be a list"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}, "output_format": FORMAT}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "banana"}}}, "output_config.format.type"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "two names"),
        ({"output_config": {"format": FORMAT}, "regex": "a"}, "output_config.format and regex"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refuses(live: Live, fields: dict[str, Any], words: str, stream: bool):
    submitted = len(live.engine.submitted)
    response = live.post(
        "/v1/messages", {"messages": HI, "max_tokens": 9, "stream": stream, **fields}
    )
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]
    assert len(live.engine.submitted) == submitted


def test_what_clients_send_is_taken(live: Live):
    fields = {
        "messages": HI, "max_tokens": 9, "system": [{"type": "text", "text": "x"}], "tools": [],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"}, "context_management": {"edits": []},
        "service_tier": "standard_only", "stream": False, "temperature": None,
    }  # fmt: skip
    response = live.post("/v1/messages?beta=true", fields, headers={"anthropic-beta": "x"})
    assert response.status_code == 200, response.text
    ignored = response.headers["x-ignored-fields"].split(", ")
    assert sorted(ignored) == [
        *("context_management", "output_config.effort"),
        *("thinking.budget_tokens", "thinking.type"),
    ]
