"""Tools, formats and reasoning in /v1/responses and /v1/messages, over an engine that plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.live import MODEL, Live
from tests.server.test_messages import HI, message, message_events
from tests.server.test_pieces_of_answers import rebuilt_blocks, rebuilt_items, without_ids
from tests.server.test_responses import create, typed_events
from tests.server.tools import templates
from tests.server.tools.formats import FORMATS, SCENARIOS, SCHEMAS
from tests.server.tools.test_chat_tools import CALL, prompt, server

FUNCTIONS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()
]
TOOLS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Live]:
    with server(CALL) as live:
        yield live


@pytest.fixture(scope="module")
def thinker() -> Iterator[Live]:
    with server("<think>\nHm.\n</think>\n\nYes.", templates.THINKING) as live:
        yield live


def says(live: Live, text: str) -> None:
    live.engine.answer = lambda *_: text


def grammar(live: Live) -> Any:
    spec = live.engine.submitted[-1].grammar
    return None if spec is None else (spec.kind, spec.text)


def test_a_call_of_a_response(hermes: Live):
    body = create(hermes, tools=FUNCTIONS, max_output_tokens=200).json()
    assert prompt(hermes) == "[get_weather][run][now]<user>hi<assistant>"
    assert grammar(hermes) is None
    [item] = body["output"]
    assert item.pop("id").startswith("fc_")
    assert item.pop("call_id").startswith("call_")
    assert item == {
        "type": "function_call",
        "status": "completed",
        "name": "get_weather",
        "arguments": '{"city": "Köln"}',
    }
    assert (body["tools"], body["tool_choice"]) == (FUNCTIONS, "auto")
    events = typed_events(create(hermes, tools=FUNCTIONS, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2] == "output_item.added"
    assert kinds.count("function_call_arguments.delta") > 3  # as they are written
    assert rebuilt_items(events) == events[-1]["response"]["output"]


def test_a_call_of_a_message(hermes: Live):
    body = message(hermes, tools=TOOLS).json()
    assert prompt(hermes) == "[get_weather][run][now]<user>hi<assistant>"
    [block] = body["content"]
    assert block.pop("id").startswith("call_")
    assert block == {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln"}}
    assert body["stop_reason"] == "tool_use"
    events = message_events(message(hermes, tools=TOOLS, stream=True))
    assert without_ids(rebuilt_blocks(events)) == [block]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_without_tools_calls_are_text(hermes: Live):
    [item] = create(hermes).json()["output"]
    assert item["content"][0]["text"] == CALL
    assert message(hermes, tools=TOOLS, tool_choice={"type": "none"}).json()["content"] == [
        {"type": "text", "text": CALL, "citations": None}
    ]
    assert prompt(hermes) == "<user>hi<assistant>"


ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "now"}],
}


@pytest.mark.parametrize(
    ("response_choice", "message_choice", "names"),
    [
        ("required", {"type": "any"}, ["get_weather", "run", "now"]),
        ({"type": "function", "name": "now"}, {"type": "tool", "name": "now"}, ["now"]),
        (ALLOWED, {"type": "tool", "name": "now"}, ["now"]),
    ],
)
def test_required_calls_are_held_to_a_grammar(
    hermes: Live, response_choice: Any, message_choice: Any, names: list[str]
):
    grammars = []
    for response in (
        create(hermes, tools=FUNCTIONS, tool_choice=response_choice),
        message(hermes, tools=TOOLS, tool_choice=message_choice),
    ):
        assert response.status_code == 200, response.text
        grammars.append(grammar(hermes))
        kind, text = grammars[-1]
        assert kind == "structural_tag"
        assert [name for name in SCHEMAS if f'"{name}' in text.replace("\\", "")] == names
    if response_choice is not ALLOWED:  # of allowed tools there may be several calls
        assert grammars[0] == grammars[1]


def test_strict_tools(hermes: Live):
    strict = [{**FUNCTIONS[0], "strict": True}]
    assert create(hermes, tools=strict).status_code == 200
    wanted = grammar(hermes)
    assert wanted is not None
    assert message(hermes, tools=[{**TOOLS[0], "strict": True}]).status_code == 200
    assert grammar(hermes) == wanted
    assert create(hermes, tools=FUNCTIONS).status_code == 200
    assert grammar(hermes) is None


def test_one_call_at_a_time():
    with server(f"{CALL}\n{NOW}") as live:
        kinds = [item["type"] for item in create(live, tools=FUNCTIONS).json()["output"]]
        assert kinds == ["function_call", "function_call"]
        output = create(live, tools=FUNCTIONS, parallel_tool_calls=False).json()["output"]
        assert [item["type"] for item in output] == ["function_call", "message"]
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        content = message(live, tools=TOOLS, tool_choice=choice).json()["content"]
        assert [block["type"] for block in content] == ["tool_use", "text"]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_every_format(name: str):
    """Two tools, three calls, with text where the format has room for it, by parser name."""
    form = FORMATS[name]
    with server(form.render(*SCENARIOS[15]), tool_call_parser=form.parser) as live:
        fields: dict[str, Any] = {"tools": FUNCTIONS, "max_output_tokens": 400}
        events = typed_events(create(live, **fields, stream=True))
        items = create(live, **fields).json()["output"]
        assert without_call_ids(rebuilt_items(events)) == without_call_ids(items)
        calls = [item for item in items if item["type"] == "function_call"]
        assert [call["name"] for call in calls] == ["now", "run", "now"]
        fields = {"tools": TOOLS, "max_tokens": 400}
        parts = message_events(message(live, **fields, stream=True))
        blocks = message(live, **fields).json()["content"]
        assert without_ids(rebuilt_blocks(parts)) == without_ids(blocks)
        uses = [block for block in blocks if block["type"] == "tool_use"]
        assert [use["input"] for use in uses] == [json.loads(call["arguments"]) for call in calls]


def test_formats(hermes: Live):
    asked = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    assert create(hermes, text={"format": asked}).json()["text"]["format"] == asked
    kind, text = grammar(hermes)
    assert (kind, json.loads(text)) == ("json_schema", SCHEMA)
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert message(hermes, **fields).status_code == 200
        assert grammar(hermes) == (kind, text)
    assert create(hermes, text={"format": {"type": "json_object"}}).status_code == 200
    assert grammar(hermes)[0] == "json_object"
    assert create(hermes, text={"format": {"type": "text"}}).status_code == 200
    assert grammar(hermes) is None
    assert create(hermes, text={"format": asked}, tools=FUNCTIONS).status_code == 200
    assert grammar(hermes)[0] == "structural_tag"  # the answer, or a call


def test_reasoning(thinker: Live):
    body = create(thinker).json()
    reasoning, answer = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert answer["content"][0]["text"] == "Yes."
    thoughts = len("<think>\nHm.\n</think>")
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": thoughts}
    events = typed_events(create(thinker, stream=True))
    assert events[-1]["response"]["usage"] == body["usage"]

    body = message(thinker).json()
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes.", "citations": None},
    ]
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": thoughts}
    parts = message_events(message(thinker, stream=True))
    assert parts[-2]["usage"] == body["usage"]


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_log_probs_are_those_of_the_message(thinker: Live, interval: int):
    fields = {"include": ["message.output_text.logprobs"], "stream_interval": interval}
    for stream in (False, True):
        response = create(thinker, **fields, stream=stream)
        body = typed_events(response)[-1]["response"] if stream else response.json()
        entries = body["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in entries) == "\n\nYes.<end>"


def test_budgets_bound_thoughts(thinker: Live, hermes: Live):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    response = message(thinker, thinking=thinking)
    assert "x-ignored-fields" not in response.headers
    assert '"max_tokens": 1024' in grammar(thinker)[1]
    assert create(thinker, max_thinking_tokens=1024).status_code == 200
    assert '"max_tokens": 1024' in grammar(thinker)[1]
    assert create(hermes, max_thinking_tokens=1024).status_code == 400
    response = message(thinker, thinking={**thinking, "type": "disabled"})
    assert response.headers["x-ignored-fields"] == "thinking.budget_tokens"
    assert grammar(thinker) is None
    assert prompt(thinker).endswith("<assistant><think>\n\n</think>")
    response = message(hermes, thinking={**thinking, "display": "omitted"})
    ignored = "thinking.type, thinking.budget_tokens, thinking.display"
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, ignored)
    assert "x-ignored-fields" not in message(hermes, thinking={"type": "disabled"}).headers
    response = message(thinker, thinking={"type": "enabled", "budget_tokens": -1})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("thinking.budget_tokens must be")


def test_an_answer_that_was_begun_inside_thoughts(thinker: Live):
    begun = [*HI, {"role": "assistant", "content": "<think>So"}]
    says(thinker, " far.</think>Yes.")
    try:
        thoughts, text = message(thinker, begun).json()["content"]
        assert (thoughts["thinking"], text["text"]) == ("far.", "Yes.")
    finally:
        says(thinker, "<think>\nHm.\n</think>\n\nYes.")


def test_keys_of_tools_without_effect_are_named(hermes: Live):
    tool = {**TOOLS[0], "cache_control": {"type": "ephemeral"}, "input_examples": [{}]}
    response = message(hermes, tools=[tool])
    assert response.headers["x-ignored-fields"] == "tools.input_examples"
    response = create(hermes, tools=[{**FUNCTIONS[0], "defer_loading": True}])
    assert response.headers["x-ignored-fields"] == "tools.defer_loading"


def test_calls_and_results_of_earlier_turns(hermes: Live):
    first = create(hermes, tools=FUNCTIONS).json()
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    fields = {"tools": FUNCTIONS, "previous_response_id": first["id"]}
    assert create(hermes, [result], **fields).status_code == 200
    told = f"[get_weather][run][now]<user>hi<assistant>{CALL}<tool>rain<assistant>"
    assert prompt(hermes) == told

    [block] = message(hermes, tools=TOOLS).json()["content"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}]
    history = [
        *HI,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": results},
    ]
    assert message(hermes, history, tools=TOOLS).status_code == 200
    assert prompt(hermes) == told


def test_templates_that_know_no_calls_are_given_text():
    with server(CALL, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}") as live:
        items = [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "noon"},
        ]
        response = create(live, items, tools=FUNCTIONS[2:])
        assert response.status_code == 200, response.text
        text = prompt(live)
        assert text.startswith("<system># Tools")
        assert text.endswith(
            f"<user>hi<assistant>{NOW}<user><tool_response>\nnoon\n</tool_response>"
        )
        [item] = response.json()["output"]
        assert item["type"] == "message"  # get_weather is none of its tools


def test_tools_count(hermes: Live):
    bodies = [
        ("/v1/responses/input_tokens", {"input": "hi", "tools": FUNCTIONS}),
        ("/v1/messages/count_tokens", {"messages": HI, "tools": TOOLS}),
    ]
    for path, body in bodies:
        count = hermes.post(path, body).json()["input_tokens"]
        assert count == len("[get_weather][run][now]<user>hi<assistant>")


def test_a_call_in_the_background(hermes: Live):
    body = create(hermes, tools=FUNCTIONS, background=True).json()
    while body["status"] in ("queued", "in_progress"):
        body = hermes.http.get(f"/v1/responses/{body['id']}").json()
    assert [item["type"] for item in body["output"]] == ["function_call"]


class Weather(pydantic.BaseModel):
    """Where to look."""

    city: str


def test_the_openai_package(hermes: Live):
    with openai.OpenAI(
        base_url=f"{hermes.url}/v1",
        api_key="None",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        tool = openai.pydantic_function_tool(Weather, name="get_weather")["function"]
        fields: dict[str, Any] = {"model": MODEL, "input": "hi"}
        tools: list[Any] = [{"type": "function", **tool}]
        [call] = client.responses.parse(**fields, tools=tools).output
        assert call.type == "function_call"
        assert call.parsed_arguments == {"city": "Köln"}
        with client.responses.stream(**fields, tools=tools) as stream:
            kinds = {event.type for event in stream}
            [streamed] = stream.get_final_response().output
        assert "response.function_call_arguments.delta" in kinds
        assert streamed.arguments == '{"city": "Köln"}'

        says(hermes, '{"city": "Köln"}')
        try:
            answer = client.responses.parse(**fields, text_format=Weather)
            assert answer.output_parsed == Weather(city="Köln")
            assert grammar(hermes)[0] == "json_schema"
            with client.responses.stream(**fields, text_format=Weather) as stream:
                assert stream.get_final_response().output_parsed == Weather(city="Köln")
        finally:
            says(hermes, CALL)


def test_the_anthropic_package(hermes: Live, thinker: Live):
    def client(live: Live) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=live.url, api_key="None", max_retries=0, _strict_response_validation=True
        )

    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": HI}
    with client(hermes) as one:
        [block] = one.messages.create(**fields, tools=TOOLS, tool_choice={"type": "any"}).content
        assert (block.type, block.input) == ("tool_use", {"city": "Köln"})
        with one.messages.stream(**fields, tools=TOOLS) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            [streamed] = stream.get_final_message().content
        assert json.loads("".join(parts)) == streamed.input == block.input
        says(hermes, '{"city": "Köln"}')
        try:
            answer = one.messages.parse(**fields, output_format=Weather)
            assert answer.parsed_output == Weather(city="Köln")
            assert grammar(hermes)[0] == "json_schema"
        finally:
            says(hermes, CALL)
    with client(thinker) as one:
        thinking: Any = {"type": "enabled", "budget_tokens": 100}
        with one.messages.stream(**fields, thinking=thinking) as stream:
            thoughts = "".join(e.thinking for e in stream if e.type == "thinking")
            final = stream.get_final_message()
        assert thoughts == "Hm."
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.usage.output_tokens_details is not None
        assert final.usage.output_tokens_details.thinking_tokens == 20


WORDS = st.text('aé漢 {}"\\\n<', max_size=5)
PARTS = st.one_of(
    WORDS,
    st.sampled_from([NOW, CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", NOW[:-4]]),
    st.builds('<tool_call>\n{{"name": "run", "arguments": {{"code": "{}"}}}}'.format, WORDS),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PARTS, max_size=6).map("".join), st.integers(1, 9), st.integers(1, 250))
def test_streams_equal_whole_answers(thinker: Live, script: str, interval: int, limit: int):
    says(thinker, script)
    fields: dict[str, Any] = {"tools": FUNCTIONS, "store": False, "stream_interval": interval}
    fields["max_output_tokens"] = limit
    whole = create(thinker, **fields).json()
    events = typed_events(create(thinker, **fields, stream=True))
    last = events[-1]["response"]
    assert without_call_ids(last["output"]) == without_call_ids(whole["output"])
    assert rebuilt_items(events) == last["output"]
    for name in ("status", "usage", "incomplete_details", "error"):
        assert last[name] == whole[name]

    fields = {"tools": TOOLS, "max_tokens": limit, "stream_interval": interval}
    body = message(thinker, **fields).json()
    parts = message_events(message(thinker, **fields, stream=True))
    assert without_ids(rebuilt_blocks(parts)) == without_ids(body["content"])
    [ending] = [event for event in parts if event["type"] == "message_delta"]
    assert ending["usage"] == body["usage"]
    assert ending["delta"] == {name: body[name] for name in ending["delta"]}


def without_call_ids(items: list[Any]) -> list[Any]:
    return [
        {name: value for name, value in item.items() if name != "call_id"}
        for item in without_ids(items)
    ]
