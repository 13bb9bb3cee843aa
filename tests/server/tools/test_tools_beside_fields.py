"""Tools and reasoning in chats that also use token ids or constraints of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.server.live import Live
from tests.server.sse import events
from tests.server.tools import templates
from tests.server.tools.test_chat_tools import CALL, TOOLS, message, server


@pytest.fixture(scope="module")
def hermes() -> Iterator[Live]:
    with server(CALL) as live:
        yield live


def test_token_ids_of_calls(hermes: Live):
    ids = [*CALL.encode(), 256]
    [choice] = hermes.chat(tools=TOOLS, return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == ids
    for interval in (1, 7):
        fields = {"return_token_ids": True, "stream_interval": interval, "stream": True}
        choices = [
            choice
            for chunk in events(hermes.chat(tools=TOOLS, **fields))
            for choice in chunk["choices"]
        ]
        assert "token_ids" not in choices[0]
        assert [one for choice in choices[1:] for one in choice["token_ids"]] == ids


def test_calls_after_a_prompt_of_token_ids(hermes: Live):
    body = {"input_ids": [7, 8], "tools": TOOLS, "tool_choice": "required"}
    response = hermes.post("/v1/chat/completions", body)
    assert hermes.engine.submitted[-1].prompt == [7, 8]
    assert hermes.engine.submitted[-1].grammar is not None
    assert message(response)["tool_calls"][0]["function"]["name"] == "get_weather"


def test_a_prompt_of_token_ids_may_end_inside_thoughts():
    with server("Hm.</think>Yes.", templates.THINKING) as live:
        body = {"input_ids": [*b"<user>hi<assistant><think>"]}
        got = message(live.post("/v1/chat/completions", body))
        assert (got["reasoning_content"], got["content"]) == ("Hm.", "Yes.")


def test_structural_tags_of_the_older_form_stand_alone(hermes: Live):
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    assert hermes.chat(response_format=older).status_code == 200
    grammar = hermes.engine.submitted[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text) == older
    response = hermes.chat(response_format=older, tools=TOOLS)
    assert response.status_code == 400
    assert "the older form goes with neither" in response.json()["message"]
