"""Calls and reasoning by a real, small model that was taught neither."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.server.process import READY, Process

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "units": {"enum": ["°C", "°F"]},
        },
        "required": ["city", "days", "units"],
        "additionalProperties": False,
    },
    "tag": {
        "type": "object",
        "properties": {"words": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
        "required": ["words"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION = [{"role": "user", "content": "Weather?"}]


def chat(server: Process, **fields: Any) -> Any:
    response = server.http.post("/v1/chat/completions", json={"messages": QUESTION, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def check(choice: Any) -> int:
    """Calls that were made, each as its schema wants it."""
    message = choice["message"]
    if choice["finish_reason"] == "length":
        return 0
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
    return len(message["tool_calls"])


def test_required_calls_are_made_at_any_temperature(default_server: Process) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80, "n": 6}
    body = chat(default_server, **fields, temperature=1.5, seed=1)
    assert sum(check(choice) > 0 for choice in body["choices"]) >= 2


def test_a_named_call_whole_and_streamed(default_server: Process) -> None:
    named = {"type": "function", "function": {"name": "tag"}}
    fields = {"tools": TOOLS, "tool_choice": named, "max_tokens": 64, "temperature": 0}
    [choice] = chat(default_server, **fields)["choices"]
    assert check(choice) == 1
    wanted = choice["message"]["tool_calls"][0]["function"]
    assert wanted["name"] == "tag"
    got, text = [], ""
    response = default_server.http.post(
        "/v1/chat/completions", json={"messages": QUESTION, **fields, "stream": True}
    )
    for line in response.text.split("\n\n"):
        if line.startswith("data: {"):
            for call in json.loads(line[6:])["choices"][0]["delta"].get("tool_calls", ()):
                got.append(call)
                text += call["function"]["arguments"]
    assert text == wanted["arguments"]
    assert [list(call) for call in got[1:]] == [["index", "function"]] * (len(got) - 1)


def streamed(server: Process, path: str, body: Any) -> list[Any]:
    """The events of a stream whose events have names."""
    response = server.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(one.split("data: ", 1)[1]) for one in response.text.split("\n\n") if one]


def post(server: Process, path: str, body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "tag"}])
def test_calls_of_responses(default_server: Process, choice: Any) -> None:
    tools = [{"type": "function", "name": name, "parameters": SCHEMAS[name]} for name in SCHEMAS]
    body = {"input": "Weather?", "tools": tools, "tool_choice": choice, "temperature": 0}
    body["parallel_tool_calls"] = False
    body["max_output_tokens"] = 100
    answer = post(default_server, "/v1/responses", body)
    assert answer["status"] == "completed"
    [item] = answer["output"]
    assert item["type"] == "function_call"
    jsonschema.validate(json.loads(item["arguments"]), SCHEMAS[item["name"]])
    events = streamed(default_server, "/v1/responses", body)
    kind = "response.function_call_arguments.delta"
    deltas = [event["delta"] for event in events if event["type"] == kind]
    assert "".join(deltas) == item["arguments"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
    more = {"input": [result], "previous_response_id": answer["id"], "max_output_tokens": 5}
    assert post(default_server, "/v1/responses", more)["output"][0]["type"] == "message"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "tag"}])
def test_calls_of_messages(default_server: Process, choice: Any) -> None:
    tools = [{"name": name, "input_schema": SCHEMAS[name]} for name in SCHEMAS]
    body = {"messages": QUESTION, "tools": tools, "max_tokens": 100, "temperature": 0}
    body["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    answer = post(default_server, "/v1/messages", body)
    assert answer["stop_reason"] == "tool_use"
    [block] = answer["content"]
    jsonschema.validate(block["input"], SCHEMAS[block["name"]])
    events = streamed(default_server, "/v1/messages", body)
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]


def test_a_schema_that_no_grammar_can_be_made_of_is_refused(default_server: Process) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "nonsense"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": QUESTION, "tools": [tool], "tool_choice": "required", "stream": True}
    response = default_server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n
{%- else %}<think>\n{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The default model behind a template that opens its reasoning."""
    path: Path = tmp_path_factory.mktemp("template") / "think.jinja"
    path.write_text(TEMPLATE)
    process = Process(None, "--context-length", "512", "--chat-template", str(path))
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()


SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("limit", [0, 5, 20])
def test_thinking_ends_at_its_limit(thinker: Process, limit: int) -> None:
    fields = {"max_thinking_tokens": limit, "max_tokens": 60, "temperature": 0}
    body = chat(thinker, **fields)
    message, usage = body["choices"][0]["message"], body["usage"]
    assert (message["reasoning_content"] is None) == (limit == 0)
    # The end tag is no token of this model: some letters of it may count as thoughts.
    assert usage["reasoning_tokens"] <= limit + len("</think>")


def test_a_format_holds_for_the_answer_and_not_for_thoughts(thinker: Process) -> None:
    fields = {"response_format": SCHEMA, "max_thinking_tokens": 12, "max_tokens": 100}
    for seed in range(5):
        [choice] = chat(thinker, **fields, seed=seed, temperature=1.0)["choices"]
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"])["a"] in (1, 2)
        assert choice["message"]["reasoning_content"]
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        [choice] = chat(thinker, **fields, **off, seed=seed, temperature=1.0)["choices"]
        assert json.loads(choice["message"]["content"])["a"] in (1, 2)
        assert choice["message"]["reasoning_content"] is None


def test_streams_agree_on_thoughts_and_answer(thinker: Process) -> None:
    fields = {"response_format": SCHEMA, "max_thinking_tokens": 12, "max_tokens": 100, "seed": 2}
    wanted = chat(thinker, **fields)["choices"][0]["message"]
    body = {"messages": QUESTION, **fields, "stream": True}
    got = {"content": "", "reasoning_content": ""}
    for line in thinker.http.post("/v1/chat/completions", json=body).text.split("\n\n"):
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for field in got:
                got[field] += delta.get(field) or ""
    assert got == {field: wanted[field] for field in got}


def test_required_calls_follow_thoughts(thinker: Process) -> None:
    fields = {"tools": TOOLS[1:], "tool_choice": "required", "max_thinking_tokens": 8}
    fields["parallel_tool_calls"] = False
    [choice] = chat(thinker, **fields, max_tokens=120, seed=3, temperature=1.0)["choices"]
    assert check(choice) >= 1
    assert choice["message"]["reasoning_content"]


def test_formats_and_budgets_of_the_other_apis(thinker: Process) -> None:
    wanted = SCHEMA["json_schema"]
    body = {"input": "Weather?", "text": {"format": {"type": "json_schema", **wanted}}}
    fields = {"max_output_tokens": 60, "chat_template_kwargs": {"enable_thinking": False}}
    answer = post(thinker, "/v1/responses", {**body, **fields})
    [item] = answer["output"]
    assert json.loads(item["content"][0]["text"])["a"] in (1, 2)

    output = {"format": {"type": "json_schema", "schema": wanted["schema"]}}
    body = {"messages": QUESTION, "output_config": output, "max_tokens": 100, "temperature": 1.0}
    body["thinking"] = {"type": "enabled", "budget_tokens": 8}
    for seed in range(3):
        answer = post(thinker, "/v1/messages", {**body, "seed": seed})
        thoughts, text = answer["content"]
        assert thoughts["type"] == "thinking"
        assert json.loads(text["text"])["a"] in (1, 2)
        thinking = answer["usage"]["output_tokens_details"]["thinking_tokens"]
        assert 0 < thinking <= 8 + len("</think>")
    body["thinking"] = {"type": "disabled"}
    [text] = post(thinker, "/v1/messages", body)["content"]
    assert json.loads(text["text"])["a"] in (1, 2)


def test_large_budgets_are_taken(thinker: Process) -> None:
    body = {"messages": QUESTION, "max_tokens": 10}
    body["thinking"] = {"type": "enabled", "budget_tokens": 31999}
    assert post(thinker, "/v1/messages", body)["content"][0]["type"] == "thinking"
