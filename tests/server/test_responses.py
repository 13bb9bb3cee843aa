"""/v1/responses: what is answered, kept, refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.fake_engine import FakeEngine
from tests.server.live import MODEL, Live


def create(live: Live, text: Any = "hi", /, **fields: Any) -> httpx.Response:
    return live.post("/v1/responses", {"input": text, **fields})


def typed_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream whose names are their types; sequence numbers are checked."""
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt(live: Live) -> str:
    return bytes(live.engine.submitted[-1].prompt).decode()


def test_the_answer_has_exactly_these_rows(live: Live):
    answer = create(live, instructions="be brief", metadata={"a": "b"}, user="me")
    body = answer.json()
    assert body.pop("id") == f"resp_{answer.headers['x-request-id']}"
    assert abs(body.pop("created_at") - time.time()) < 60
    assert abs(body.pop("completed_at") - time.time()) < 60
    [item] = body.pop("output")
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}
        ],
    }
    tokens = len("<system>be brief\n<user>hi\n<assistant>")
    assert body == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "usage": {
            "input_tokens": tokens,
            "input_tokens_details": {
                "cached_tokens": tokens // 2,
                "cache_write_tokens": tokens - tokens // 2,
            },
            "output_tokens": 12,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens + 12,
        },
        "model": "default",
        "background": False,
        "instructions": "be brief",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "me",
    }


def test_streams_are_typed_events(live: Live):
    events = typed_events(create(live, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in events[4:-4]) == "Hello world"
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert live.http.get(f"/v1/responses/{last['id']}").json() == last


def test_too_few_tokens_make_it_incomplete(live: Live):
    body = create(live, max_output_tokens=3).json()
    assert (body["status"], body["output"][0]["status"]) == ("incomplete", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None
    events = typed_events(create(live, max_output_tokens=3, stream=True))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hel"


def test_an_answer_without_text_is_an_empty_message():
    with Live(FakeEngine(answer=lambda prompt, sample: "")) as live:
        body = create(live).json()
        assert body["output"][0]["content"][0]["text"] == ""
        events = typed_events(create(live, stream=True))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {}])
def test_log_probs(live: Live, fields: dict[str, Any]):
    fields = {**fields, "top_logprobs": 2, "max_output_tokens": 5}
    body = create(live, **fields).json()
    entries = body["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == list("Hello")
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 5
    events = typed_events(create(live, **fields, stream=True))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == entries
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


def test_log_probs_without_alternatives(live: Live):
    body = create(live, include=["message.output_text.logprobs"]).json()
    entries = body["output"][0]["content"][0]["logprobs"]
    assert len(entries) == body["usage"]["output_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_items_become_messages(live: Live):
    items = [
        {"role": "developer", "content": "short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    assert create(live, items).status_code == 200
    assert prompt(live) == "<system>short\n<user>a\n<assistant>b\n<user>c\n<assistant>"


TOOL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}"
    "{% if m.tool_call_id %} {{ m.tool_call_id }} {{ m.name }}{% endif %}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}think {{ enable_thinking }}{% endif %}"
)


@pytest.fixture(scope="module")
def tool_live() -> Iterator[Live]:
    with Live(template=TOOL_TEMPLATE) as server:
        yield server


def test_calls_and_results_of_the_history(tool_live: Live):
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "look"}]},
        {"type": "message", "role": "assistant", "content": "Looking."},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"at": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "get", "arguments": '{"at": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "sun"}],
        },
    ]
    assert create(tool_live, items, reasoning={"effort": "low"}).status_code == 200
    assert prompt(tool_live) == (
        "<user>weather?\n"
        '<assistant>(look)Looking.[c1 get {"at": "Paris"}][c2 get {"at": "Rome"}]\n'
        "<tool c1 get>rain\n<tool c2 get>sun\neffort low"
    )


def test_errors_in_a_stream_end_it():
    with Live(FakeEngine(fail_after=3, delay_s=0.005)) as live:
        events = typed_events(create(live, stream=True))
        last = events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["message"] == "logits are not finite"
        stored = live.http.get(f"/v1/responses/{last['response']['id']}").json()
        assert stored == last["response"]
        assert create(live).status_code == 500


def turns(count: int) -> list[dict[str, str]]:
    items = [{"role": "system", "content": "rules"}]
    for turn in range(count):
        items += [
            {"role": "user", "content": f"question {turn} {'x' * 30}"},
            {"role": "assistant", "content": f"answer {turn} {'y' * 30}"},
        ]
    return [*items, {"role": "user", "content": "last"}]


@pytest.mark.parametrize("count", [1, 5, 6, 7, 20])
def test_truncation_drops_the_oldest_turns(live: Live, count: int):
    fields = {"truncation": "auto", "max_output_tokens": 12}
    assert create(live, turns(count), **fields).json()["truncation"] == "auto"
    text = prompt(live)
    assert text.startswith("<system>rules\n<user>")
    assert text.endswith("<user>last\n<assistant>")
    assert len(text) <= 512 - 12
    kept = [turn for turn in range(count) if f"question {turn} " in text]
    assert kept == [turn for turn in range(count) if f"answer {turn} " in text]
    assert kept == list(range(count - len(kept), count))
    assert len(kept) == count or len(text) + 100 > 512 - 12


def test_without_truncation_long_inputs_are_refused(live: Live):
    for fields in ({}, {"truncation": "disabled"}):
        response = create(live, turns(20), **fields)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] == "input"
    response = create(live, "x" * 600, truncation="auto")
    assert response.json()["error"]["code"] == "context_length_exceeded"


USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "name": "f"}
JSON_OBJECT = {"type": "json_object"}
CALL_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "banana"}]}, "input[0].type"),
        ({"input": [{"type": ["a"]}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [USER, CALL_OUTPUT]}, "input"),
        ({"input": [{**CALL_OUTPUT, "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id"),
        ({"input": [{"id": 5}]}, "input[0].id"),
        ({"input": "refuse me"}, "input"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"truncation": "banana"}, "truncation"),
        ({"include": ["banana"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "banana"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": "required", "text": {"format": JSON_OBJECT}},
            "tool_choice",
        ),
        ({"text": {"format": {"type": "banana"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "text.format"),
        ({"text": {"format": JSON_OBJECT}, "regex": "a"}, "text.format"),
        ({"response_format": JSON_OBJECT}, "response_format"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"model": "other"}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refuses(live: Live, fields: dict[str, Any], param: str, stream: bool):
    submitted = len(live.engine.submitted)
    response = live.post("/v1/responses", {"input": "hi", "stream": stream, **fields})
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == param
    assert len(live.engine.submitted) == submitted


def test_fields_that_exclude_each_other(live: Live):
    cases = {
        "store": {"background": True, "store": False},
        "stream_options": {"stream_options": {"include_obfuscation": False}},
        "stream_options.continuous_usage_stats": {
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},
        },
    }
    for param, fields in cases.items():
        response = create(live, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_what_clients_send_is_taken(live: Live):
    response = create(
        live, store=False, include=["reasoning.encrypted_content"], parallel_tool_calls=False,
        prompt_cache_key="k", client_metadata={"a": 1}, 
        reasoning={"effort": "low", "summary": "auto"},
        tool_choice="auto", tools=[], service_tier="auto", text={"verbosity": "low"},
        max_tool_calls=3, temperature=None, truncation=None, stream_options=None, model=MODEL,
        prompt_cache_retention="24h", safety_identifier="s", background=False, metadata=None,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == "reasoning.effort"  # of the template here
    body = response.json()
    assert (body["prompt_cache_key"], body["safety_identifier"]) == ("k", "s")
    assert body["text"]["verbosity"] == "low"
    assert body["model"] == MODEL
    assert create(live, banana=1).headers["x-ignored-fields"] == "banana"
    with Live() as other:
        assert create(other, banana=1, background=True).headers["x-ignored-fields"] == "banana"


def test_sampling_fields_reach_the_engine(live: Live):
    body = create(
        live, temperature=0.5, top_p=0.9, top_k=7, max_output_tokens=9, seed=42, stop="zz",
        cache_salt="a", rid="mine",
    ).json()  # fmt: skip
    submitted = live.engine.submitted[-1]
    sampling = submitted.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.max_new_tokens, sampling.seed, sampling.stop) == (9, 42, ["zz"])
    assert (submitted.rid, submitted.namespace != "") == ("mine", True)
    assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.5, 0.9, 9)


def test_tokens_are_counted(live: Live):
    first = create(live).json()
    body = {"input": "x" * 5000, "previous_response_id": first["id"], "instructions": "a"}
    answer = live.post("/v1/responses/input_tokens", body).json()
    earlier = len("<system>a\n<user>hi\n<assistant>Hello world\n<user>\n<assistant>")
    assert answer == {"object": "response.input_tokens", "input_tokens": 5000 + earlier}
    response = live.post("/v1/responses/input_tokens", {"input": "refuse me"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
