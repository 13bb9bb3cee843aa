"""Reasoning, text and tool calls of a scripted splitter, in both families, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.fake_engine import FakeEngine
from tests.server.live import MODEL, Live
from tests.server.scripted import CALL, SAY, THINK, WITH, MarkSplitter
from tests.server.test_messages import message, message_events
from tests.server.test_responses import create, typed_events

from trunkline.server.config import ApiOptions, ServerConfig
from trunkline.server.openai.output import Output
from trunkline.server.openai.splitting import OutputSplitter

SCRIPT = f'{THINK}hm, é{SAY}I look.{CALL}get{WITH}{{"at": "Zürich"}}{CALL}now{WITH}{{}}'
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        splitter = lambda output: OutputSplitter(think=MarkSplitter())  # noqa: E731
        patch.setattr(Output, "splitter", splitter)
        with Live(FakeEngine(answer=lambda prompt, sample: SCRIPT)) as server:
            yield server


def test_items_of_a_response(scripted: Live):
    items = create(scripted).json()["output"]
    ids = [item.pop("id").partition("_")[0] for item in items]
    assert ids == ["rs", "msg", "fc", "fc"]
    part = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "status": "completed"}
    assert items == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm, é"}],
        },
        {"type": "message", "status": "completed", "role": "assistant", "content": [part]},
        {**call, "call_id": "call_0", "name": "get", "arguments": '{"at": "Zürich"}'},
        {**call, "call_id": "call_1", "name": "now", "arguments": "{}"},
    ]


def test_events_of_a_response(scripted: Live):
    kinds: list[str] = []
    for event in typed_events(create(scripted, stream=True)):
        kind = event["type"].removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    message = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *message),
        *call,
        *call,
        "completed",
    ]


def test_only_the_last_item_is_incomplete(scripted: Live):
    items = create(scripted, max_output_tokens=30).json()["output"]
    assert [item["status"] for item in items] == ["completed", "completed", "incomplete"]


def test_log_probs_wait_for_the_message(scripted: Live):
    fields = {"top_logprobs": 1, "max_output_tokens": 12}
    whole = create(scripted, **fields).json()["output"][1]["content"][0]["logprobs"]
    last = typed_events(create(scripted, **fields, stream=True))[-1]["response"]
    assert last["output"][1]["content"][0]["logprobs"] == whole
    assert len(whole) == 12


def test_the_openai_package_takes_all_items(scripted: Live):
    with openai.OpenAI(
        base_url=f"{scripted.url}/v1",
        api_key="None",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        whole = client.responses.create(model=MODEL, input="hi")
        with client.responses.stream(model=MODEL, input="hi") as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_response()
        assert [item.type for item in whole.output] == [item.type for item in streamed.output]
        assert streamed.output[2].arguments == whole.output[2].arguments == '{"at": "Zürich"}'
        output = {"type": "function_call_output", "call_id": "call_0", "output": "rain"}
        client.responses.create(
            model=MODEL, input=[*HI, *(item.to_dict() for item in whole.output), output]
        )
        listed = client.responses.input_items.list(
            client.responses.create(model=MODEL, input=[output], previous_response_id=whole.id).id,
            order="asc",
        )
        assert [item.type for item in listed.data] == [
            *("message", "reasoning", "message", "function_call", "function_call"),
            "function_call_output",
        ]


def test_blocks_of_a_message(scripted: Live):
    body = message(scripted).json()
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm, é", "signature": ""},
        {"type": "text", "text": "I look.", "citations": None},
        {"type": "tool_use", "id": "call_0", "name": "get", "input": {"at": "Zürich"}},
        {"type": "tool_use", "id": "call_1", "name": "now", "input": {}},
    ]
    assert body["stop_reason"] == "tool_use"
    cut = message(scripted, max_tokens=30).json()
    assert cut["content"][2]["input"] == {"arguments": '{"at": "Z'}
    assert cut["stop_reason"] == "max_tokens"


def test_the_anthropic_package_takes_all_blocks(scripted: Live):
    with anthropic.Anthropic(
        base_url=scripted.url, api_key="None", max_retries=0, _strict_response_validation=True
    ) as client:
        whole = client.messages.create(model=MODEL, max_tokens=99, messages=HI)
        with client.messages.stream(model=MODEL, max_tokens=99, messages=HI) as stream:
            thoughts = "".join(e.thinking for e in stream if e.type == "thinking")
            streamed = stream.get_final_message()
        assert thoughts == "hm, é"
        rows = [[block.to_dict() for block in one.content] for one in (streamed, whole)]
        assert rows[0] == rows[1]
        assert streamed.stop_reason == whole.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": "call_0", "content": "rain"}
        history = [*HI, {"role": "assistant", "content": whole.content}]
        client.messages.create(
            model=MODEL,
            max_tokens=99,
            messages=[*history, {"role": "user", "content": [result]}],
        )


def test_servers_that_prefer_several_samples_make_one_here():
    config = ServerConfig(api=ApiOptions(preferred_sampling_params='{"n": 2}'))
    with Live(config=config) as live:
        assert len(live.chat().json()["choices"]) == 2
        assert len(create(live).json()["output"]) == 1
        assert len(message(live).json()["content"]) == 1


WORDS = st.text('aé漢 {}"\\n', max_size=6)
PIECES = st.one_of(
    st.tuples(st.sampled_from([THINK, SAY]), WORDS).map("".join),
    st.tuples(st.sampled_from(["f", "get"]), WORDS).map(
        lambda one: f"{CALL}{one[0]}{WITH}{one[1]}"
    ),
)


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


def rebuilt_items(events: list[dict[str, Any]]) -> list[Any]:
    """The items of a stream, from nothing but what was added and the deltas."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind.endswith("text.delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
        elif kind == "output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert items[event["output_index"]] == event["item"]
    return items


def rebuilt_blocks(events: list[dict[str, Any]]) -> list[Any]:
    """The blocks of a stream, from nothing but what was started and the deltas."""
    blocks: list[Any] = []
    arguments: dict[int, str] = {}
    for event in events:
        index = event.get("index")
        if event["type"] == "content_block_start":
            assert index == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            else:
                blocks[index][blocks[index]["type"]] += delta[blocks[index]["type"]]
    for index, text in arguments.items():
        try:
            value = json.loads(text) if text else {}
        except ValueError:
            value = None
        blocks[index]["input"] = value if isinstance(value, dict) else {"arguments": text}
    return blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=5).map("".join), st.integers(1, 9), st.integers(1, 60))
def test_streams_equal_whole_answers(scripted: Live, script: str, interval: int, limit: int):
    scripted.engine.answer = lambda prompt, sample: script
    try:
        fields = {"max_output_tokens": limit, "stream_interval": interval, "store": False}
        whole = create(scripted, **fields).json()
        events = typed_events(create(scripted, **fields, stream=True))
        last = events[-1]["response"]
        assert rebuilt_items(events) == last["output"]
        assert without_ids(last["output"]) == without_ids(whole["output"])
        for name in ("status", "usage", "incomplete_details", "error"):
            assert last[name] == whole[name]

        fields = {"max_tokens": limit, "stream_interval": interval}
        body = message(scripted, **fields).json()
        parts = message_events(message(scripted, **fields, stream=True))
        assert rebuilt_blocks(parts) == body["content"]
        [ending] = [event for event in parts if event["type"] == "message_delta"]
        assert ending["usage"] == body["usage"]
        assert ending["delta"] == {name: body[name] for name in ending["delta"]}
    finally:
        scripted.engine.answer = lambda prompt, sample: SCRIPT
