"""Tools and reasoning in chat completions, over an engine that says what the test wants."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pydantic
import pytest
from tests.chat_templates import GEMMA2
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live
from tests.server.sse import events
from tests.server.tools import templates
from tests.server.tools.formats import FORMATS, SCENARIOS, SCHEMAS

from trunkline.server.config import ServerConfig
from trunkline.server.openai.reasoning import registry as reasoning_registry
from trunkline.server.openai.tools import registry as tool_registry

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "…", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def server(answer: str, template: str = templates.HERMES, **options: Any) -> Live:
    config = ServerConfig()
    config = replace(config, api=replace(config.api, **options))
    return Live(FakeEngine(answer=lambda *_: answer), config, template=template)


@pytest.fixture(scope="module")
def hermes() -> Iterator[Live]:
    with server(CALL) as live:
        yield live


def prompt(live: Live) -> str:
    return bytes(live.engine.submitted[-1].prompt).decode()


def message(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def streamed(response: httpx.Response) -> tuple[dict[str, Any], str]:
    """The message that a stream makes, put together as clients do, and its finish reason."""
    assert response.status_code == 200, response.text
    result: dict[str, Any] = {"content": None, "reasoning_content": None}
    reason = None
    for chunk in events(response):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    result[field] = (result[field] or "") + delta[field]
            for call in delta.get("tool_calls", ()):
                known = result.setdefault("tool_calls", [])
                if call["index"] == len(known):
                    assert list(call) == ["index", "id", "type", "function"]
                    assert call["function"]["arguments"] == ""
                    known.append(json.loads(json.dumps(call)))
                else:
                    assert list(call) == ["index", "function"]
                    assert list(call["function"]) == ["arguments"]
                    known[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return result, reason


def without_ids(one: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in one.get("tool_calls", ())]
    return {key: one[key] for key in ("content", "reasoning_content")} | {"tool_calls": calls}


def test_a_call_whole(hermes: Live):
    body = hermes.chat(tools=TOOLS).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call == {
        "index": 0,
        "id": call["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
    }


def test_a_call_streamed(hermes: Live):
    response = hermes.chat(tools=TOOLS, stream=True)
    chunks = [chunk["choices"][0]["delta"] for chunk in events(response)]
    calls = [delta["tool_calls"] for delta in chunks if "tool_calls" in delta]
    assert len(calls) > 3  # arguments come while they are written
    assert all(len(one) == 1 for one in calls)
    got, reason = streamed(response)
    assert reason == "tool_calls"
    assert without_ids(got) == without_ids(message(hermes.chat(tools=TOOLS)))
    assert len({call["id"] for call in got["tool_calls"]}) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_streams_and_wholes_agree_for_every_format(name: str):
    """Two calls, with text where the format has room for it, by parser name."""
    form = FORMATS[name]
    text = form.render(*SCENARIOS[15])
    with server(text, tool_call_parser=form.parser) as live:
        whole = live.chat(tools=TOOLS, max_tokens=400).json()["choices"][0]
        got, reason = streamed(live.chat(tools=TOOLS, max_tokens=400, stream=True))
        assert whole["finish_reason"] == reason == "tool_calls"
        assert without_ids(got) == without_ids(whole["message"])
        names = [call["function"]["name"] for call in got["tool_calls"]]
        assert names == ["now", "run", "now"]


def test_the_sdk_puts_streams_together(hermes: Live):
    client = openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none")
    with client.chat.completions.stream(
        model="default", messages=[{"role": "user", "content": "hi"}], tools=TOOLS
    ) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Köln"},
    )
    assert final.choices[0].finish_reason == "tool_calls"


class get_weather(pydantic.BaseModel):
    """The weather."""

    city: str


def test_the_sdk_parses_calls_of_strict_tools(hermes: Live):
    client = openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none")
    tool = openai.pydantic_function_tool(get_weather)
    messages = [{"role": "user", "content": "hi"}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `metadata` is not what the SDK's own type foresees
        parsed = client.chat.completions.parse(model="default", messages=messages, tools=[tool])
    [call] = parsed.choices[0].message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Köln")
    assert hermes.engine.submitted[-1].grammar is not None
    function = {"name": call.function.name, "arguments": call.function.arguments}
    made = {"id": call.id, "type": "function", "function": function}
    again = [*messages, {"role": "assistant", "tool_calls": [made]}]
    again.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    client.chat.completions.create(model="default", messages=again, tools=[tool])
    assert '"arguments": {"city": "Köln"}' in prompt(hermes)


def test_without_tools_or_with_none_text_stays_text(hermes: Live):
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = hermes.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert "get_weather" not in prompt(hermes)


def test_the_template_gets_the_tools(hermes: Live):
    hermes.chat(tools=TOOLS)
    assert prompt(hermes).startswith("[get_weather][run][now]<user>hi")


def test_a_call_that_was_cut_off_ends_with_length(hermes: Live):
    choice = hermes.chat(tools=TOOLS, max_tokens=65).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


def test_n_samples_have_calls_of_their_own(hermes: Live):
    choices = hermes.chat(tools=TOOLS, n=3).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
    chunks = events(hermes.chat(tools=TOOLS, n=3, stream=True))
    begun = [
        (chunk["choices"][0]["index"], call["index"])
        for chunk in chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert sorted(begun) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
def test_log_probs_cover_every_token(hermes: Live, tool_choice: str):
    fields = {"tools": TOOLS, "tool_choice": tool_choice, "logprobs": True, "top_logprobs": 2}
    body = hermes.chat(**fields).json()
    whole = body["choices"][0]["logprobs"]["content"]
    assert len(whole) == body["usage"]["completion_tokens"]
    entries = []
    for chunk in events(hermes.chat(**fields, stream=True)):
        for choice in chunk["choices"]:
            entries += (choice["logprobs"] or {"content": []})["content"]
    assert entries == whole


def test_a_malformed_call_is_content():
    text = '<tool_call>\n{"name": "get_weather", "arguments": oops}\n</tool_call>'
    with server(text) as live:
        whole = live.chat(tools=TOOLS).json()["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
        assert streamed(live.chat(tools=TOOLS, stream=True))[0]["content"] == text


def test_parallel_calls_can_be_forbidden():
    with server(f"{CALL}\n{CALL}") as live:
        assert len(message(live.chat(tools=TOOLS))["tool_calls"]) == 2
        assert len(message(live.chat(tools=TOOLS, parallel_tool_calls=False))["tool_calls"]) == 1


def test_a_named_tool_allows_one_call_of_it():
    with server(CALL) as live:
        named = {"type": "function", "function": {"name": "get_weather"}}
        choice = live.chat(tools=TOOLS, tool_choice=named).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        spec = live.engine.submitted[-1].grammar
        assert spec is not None
        assert spec.kind == "structural_tag"
        assert "get_weather" in spec.text
        assert '"run' not in spec.text
        allowed = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [TOOLS[1]]},
        }
        assert message(live.chat(tools=TOOLS, tool_choice=allowed))["content"] == CALL
        assert live.engine.submitted[-1].grammar is None


WEATHER = TOOLS[0]
BAD = [
    ({"tools": {}}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [WEATHER] * 513}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters.type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
     "tools[0].function.strict"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
     "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"max_thinking_tokens": 5}, "max_thinking_tokens"),
    ({"messages": [{"role": "user", "content": "x"},
                   {"role": "tool", "content": "y", "tool_call_id": "call_1"}]},
     "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
     "messages[0].function_call"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_tools_are_refused(hermes: Live, fields: dict[str, Any], param: str, stream: bool):
    response = (
        hermes.chat(**fields)
        if "messages" not in fields
        else hermes.post("/v1/chat/completions", {**fields, "stream": stream})
    )
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == param


HISTORY = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0123456789",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
            },
            {
                "id": "call_x",
                "type": "function",
                "function": {"name": "now", "arguments": "{}"},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_x", "content": [{"type": "text", "text": "12:00"}]},
]


NOW = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
SHORT = [
    {"role": "assistant", "tool_calls": [{**NOW, "id": "a"}, {**NOW, "id": "b"}]},
    {"role": "tool", "tool_call_id": "a", "content": "1"},
    {"role": "tool", "tool_call_id": "b", "content": "2"},
]


def history(live: Live) -> str:
    response = live.post("/v1/chat/completions", {"messages": HISTORY, "tools": [TOOLS[2]]})
    assert response.status_code == 200, response.text
    return prompt(live)


def test_history_shows_arguments_as_objects(hermes: Live):
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in history(hermes)


def test_ids_in_history_get_the_form_that_a_model_knows():
    with server("Hi", templates.MISTRAL) as live:
        text = history(live)
        [one] = {part[:9] for part in text.split("} ")[1:2]}
        assert f"({one})" in text
    with server("Hi", templates.KIMI) as live:
        text = history(live)
        assert "functions.get_weather:0" in text
        assert "(functions.now:1)" in text


def test_templates_without_tools_are_given_them_as_text():
    with server(CALL, "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}") as live:
        message(live.post("/v1/chat/completions", {"messages": SHORT, "tools": [TOOLS[2]]}))
        text = prompt(live)
        assert text.startswith("<system># Tools")
        assert '"name": "now"' in text.partition("<user>")[0]
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        assert f"<assistant>{call}\n{call}\n<user>" in text
        assert text.count("<user>") == 1  # the results are one turn
        results = "".join(f"<tool_response>\n{one}\n</tool_response>\n" for one in (1, 2))
        assert text.endswith(results)
        assert message(live.chat(tools=TOOLS[:1]))["tool_calls"]


def test_templates_without_system_messages_are_given_tools_in_the_first_turn():
    with server(CALL, GEMMA2) as live:
        assert message(live.chat(tools=TOOLS[:1]))["tool_calls"]
        text = prompt(live)
        assert text.startswith("<start_of_turn>user\n# Tools")
        assert '"name": "get_weather"' in text
        assert text.endswith("\n\nhi<end_of_turn>\n<start_of_turn>model\n")
        calls = [{"role": "assistant", "tool_calls": [{**NOW, "id": "a"}]}, SHORT[1]]
        parts = [{"role": "user", "content": [{"type": "text", "text": "ho"}]}, *calls]
        message(live.chat(messages=parts, tools=[TOOLS[2]]))
        assert prompt(live).startswith("<start_of_turn>user\n# Tools")
        assert " ho<end_of_turn>\n<start_of_turn>model\n<tool_call>" in prompt(live)
        system = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "hi"}]
        response = live.chat(messages=system, tools=TOOLS[:1])
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "System role not supported"


def test_with_no_parser_calls_stay_text_and_cannot_be_required():
    with server(CALL, tool_call_parser="none") as live:
        assert message(live.chat(tools=TOOLS))["content"] == CALL
        response = live.chat(tools=TOOLS, tool_choice="required")
        assert response.status_code == 400
        assert "--tool-call-parser" in response.json()["error"]["message"]


THOUGHTS = "<think>\nHm, hm.\n</think>\n\n"


@pytest.fixture(scope="module")
def thinking() -> Iterator[Live]:
    with server(THOUGHTS + "Yes.", templates.THINKING) as live:
        yield live


def test_reasoning_is_separated_whole_and_streamed(thinking: Live):
    whole = thinking.chat().json()
    [choice] = whole["choices"]
    assert choice["message"]["reasoning_content"] == "Hm, hm."
    assert choice["message"]["content"] == "Yes."
    # one token per byte: up to the end of the end tag
    counted = len("<think>\nHm, hm.\n</think>")
    assert whole["usage"]["reasoning_tokens"] == counted
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
    response = thinking.chat(stream=True, stream_options={"include_usage": True})
    got, reason = streamed(response)
    assert (got["reasoning_content"], got["content"], reason) == ("Hm, hm.", "Yes.", "stop")
    assert events(response)[-1]["usage"] == whole["usage"]


def test_reasoning_may_stay_in_the_content(thinking: Live):
    for stream in (False, True):
        response = thinking.chat(separate_reasoning=False, stream=stream)
        got = streamed(response)[0] if stream else message(response)
        assert got["content"] == THOUGHTS + "Yes."
        assert got["reasoning_content"] is None
    assert thinking.chat(separate_reasoning=False).json()["usage"]["reasoning_tokens"] > 0


def test_reasoning_may_come_in_one_chunk(thinking: Live):
    def parts(**fields: Any) -> list[str]:
        chunks = events(thinking.chat(stream=True, **fields))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        return [d["reasoning_content"] for d in deltas if d.get("reasoning_content")]

    assert len(parts()) > 2
    assert parts(stream_reasoning=False) == ["Hm, hm."]


def test_reasoning_that_the_prompt_opens():
    with server("Hm.</think>Yes.", templates.THINKING) as live:
        got = message(live.chat(chat_template_kwargs={"opened": True}))
        assert (got["reasoning_content"], got["content"]) == ("Hm.", "Yes.")
        off = message(live.chat(chat_template_kwargs={"enable_thinking": False}))
        assert (off["reasoning_content"], off["content"]) == (None, "Hm.</think>Yes.")


def test_an_answer_without_tags_is_no_reasoning():
    with server("Yes.", templates.THINKING) as live:
        body = live.chat().json()
        assert body["choices"][0]["message"]["content"] == "Yes."
        assert body["choices"][0]["message"]["reasoning_content"] is None
        assert body["usage"]["reasoning_tokens"] == 0


def test_reasoning_and_a_call():
    with server(THOUGHTS + CALL, templates.THINKING) as live:
        got = message(live.chat(tools=TOOLS))
        assert got["reasoning_content"] == "Hm, hm."
        assert got["content"] is None
        assert got["tool_calls"][0]["function"]["name"] == "get_weather"
        assert without_ids(streamed(live.chat(tools=TOOLS, stream=True))[0]) == without_ids(got)


def test_harmony():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    with server(text, templates.HARMONY) as live:
        got = message(live.chat())
        assert (got["reasoning_content"], got["content"]) == ("Hm.", "Yes.")
        assert message(live.chat(separate_reasoning=False))["content"] == "Hm.Yes."
        assert live.chat().json()["usage"]["reasoning_tokens"] > 0


def test_parse_function_call(hermes: Live):
    body = {"text": f"So:\n{CALL}", "tools": TOOLS}
    for fields in ({}, {"tool_call_parser": "qwen25"}):
        response = hermes.post("/parse_function_call", body | fields)
        assert response.json() == {
            "normal_text": "So:",
            "calls": [{"tool_index": 0, "name": "get_weather", "parameters": '{"city": "Köln"}'}],
        }
    bad = hermes.post("/parse_function_call", body | {"tool_call_parser": "x"})
    assert bad.status_code == 400
    assert hermes.post("/parse_function_call", {"text": "x", "tools": []}).status_code == 400


def test_separate_reasoning(hermes: Live):
    for text in (THOUGHTS + "Yes.", "Hm, hm.</think>Yes."):
        response = hermes.post(
            "/separate_reasoning", {"text": text, "reasoning_parser": "deepseek-r1"}
        )
        assert response.json() == {"reasoning_text": "Hm, hm.", "text": "Yes."}
    response = hermes.post("/separate_reasoning", {"text": "Yes.", "reasoning_parser": "qwen3"})
    assert response.json() == {"reasoning_text": None, "text": "Yes."}
    assert hermes.post("/separate_reasoning", {"text": "x"}).status_code == 400


def test_every_parser_has_a_name_that_the_command_line_takes():
    assert {"hermes", "llama3", "mistral", "pythonic", "deepseekv3"} <= set(tool_registry.PARSERS)
    assert {"deepseek-r1", "qwen3", "kimi", "glm45"} <= set(reasoning_registry.PARSERS)
