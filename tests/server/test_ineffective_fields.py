"""Known fields that the rest of a body, or the model, leaves without effect are named."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.live import Live

from trunkline.server.config import ApiOptions, ServerConfig

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGE, GENERATE, TOKENIZE = "/v1/messages", "/generate", "/tokenize"
READER = "{{ reasoning_effort }}{{ enable_thinking }}{{ messages[0].content }}"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETION: {"prompt": "hi"},
    RESPONSE: {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    MESSAGE: {"messages": HI, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HI},
    GENERATE: {"text": "hi"},
    "/v1/embeddings": {"input": "hi"},
}
OBFUSCATION = {"include_obfuscation": True}
EFFORT = {"reasoning_effort": "low"}

NAMED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (path, {"stream_interval": 2}, "stream_interval")
        for path in (CHAT, COMPLETION, RESPONSE, MESSAGE)
    ),
    (GENERATE, {"sampling_params": {"stream_interval": 2}}, "sampling_params.stream_interval"),
    (
        GENERATE,
        {"text": ["a", "b"], "sampling_params": [{}, {"stream_interval": 2}]},
        "sampling_params.stream_interval",
    ),
    *(
        (path, {"stream": True, "stream_options": {**OBFUSCATION, "zz": 1}}, words)
        for path in (CHAT, COMPLETION, RESPONSE)
        for words in ["stream_options.zz, stream_options.include_obfuscation"]
    ),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (COMPLETION, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (
        CHAT,
        {"input_ids": [1], "messages": [], "add_generation_prompt": False},
        "add_generation_prompt",
    ),
    (RESPONSE, {"text": {"zz": 1}, "reasoning": {"zz": 1}}, "reasoning.zz, text.zz"),
    (RESPONSE, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSE, {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
    (
        "/v1/responses/input_tokens",
        {"reasoning": {"effort": "low"}, "zz": 1},
        "zz, reasoning.effort",
    ),
    (
        MESSAGE,
        {"output_config": {"effort": "low", "zz": 1}},
        "output_config.zz, output_config.effort",
    ),
    (MESSAGE, {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
    (MESSAGE, {"thinking": {"type": "enabled"}}, "thinking.type"),
    ("/v1/messages/count_tokens", {"thinking": {"type": "adaptive"}, "zz": 1}, "zz, thinking.type"),
    (TOKENIZE, {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    (TOKENIZE, {"messages": HI, "chat_template_kwargs": {"zz": 1}}, "chat_template_kwargs.zz"),
    (
        TOKENIZE,
        {
            "prompt": "a",
            "tools": TOOLS,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"zz": 1},
        },
        "add_generation_prompt, continue_final_message, chat_template_kwargs, tools",
    ),
    ("/abort_request", {"rid": "a", "abort_all": True, "zz": 1}, "zz, rid"),
    ("/abort_request", {"rid": "a", "finished_reason": "x"}, "finished_reason"),
]
FINE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"stream": True, "stream_interval": 2, "stream_options": {"include_usage": True}}),
    (CHAT, {"stream_interval": None, "max_tokens": 3, "max_completion_tokens": 3}),
    (CHAT, {"input_ids": [1], "messages": [], "add_generation_prompt": True}),
    (GENERATE, {"stream": True, "sampling_params": {"stream_interval": 2}}),
    (RESPONSE, {"reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}}),
    (MESSAGE, {"thinking": {"type": "disabled"}}),
    (TOKENIZE, {"messages": HI, "add_special_tokens": False, "tools": TOOLS}),
    (TOKENIZE, {"prompt": "a", "add_special_tokens": True, "add_generation_prompt": None}),
    ("/abort_request", {"rid": "a", "abort_all": False}),
]


@pytest.mark.parametrize(("path", "fields", "names"), NAMED)
def test_named(live: Live, path: str, fields: dict[str, Any], names: str):
    response = live.post(path, {**BASES.get(path, {}), **fields})
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, names)


@pytest.mark.parametrize(("path", "fields"), FINE)
def test_not_named(live: Live, path: str, fields: dict[str, Any]):
    response = live.post(path, {**BASES.get(path, {}), **fields})
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers


def test_strict_servers_refuse_them():
    config = ServerConfig(api=ApiOptions(strict_fields=True))
    with Live(config=config) as live:
        for path, fields, names in NAMED:
            response = live.post(path, {**BASES.get(path, {}), **fields})
            assert response.status_code == 400, (path, fields)
            assert names.partition(",")[0] in response.json()["error"]["message"]


def test_what_a_template_reads_has_an_effect():
    with Live(template=READER) as live:
        for path, fields in (
            (CHAT, EFFORT),
            (CHAT, {"chat_template_kwargs": EFFORT}),
            (CHAT, {**EFFORT, "chat_template_kwargs": EFFORT}),
            (RESPONSE, {"reasoning": {"effort": "low"}}),
            (MESSAGE, {"output_config": {"effort": "low"}, "thinking": {"type": "enabled"}}),
        ):
            response = live.post(path, {**BASES[path], **fields})
            assert "x-ignored-fields" not in response.headers, (path, fields)


def test_of_two_values_of_a_variable_the_one_that_loses_is_named():
    high = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    for path, fields, name, prompt in (
        (CHAT, EFFORT, "chat_template_kwargs.reasoning_effort", b"low"),
        (
            RESPONSE,
            {"reasoning": {"effort": "low"}},
            "chat_template_kwargs.reasoning_effort",
            b"low",
        ),
        (MESSAGE, {"output_config": {"effort": "low"}}, "output_config.effort", b"high"),
    ):
        with Live(template=READER) as live:
            response = live.post(path, {**BASES[path], **high, **fields})
            assert response.headers["x-ignored-fields"] == name
            assert bytes(live.engine.submitted[-1].prompt).startswith(prompt)


def test_tools_that_nothing_reads_are_named():
    config = ServerConfig(api=ApiOptions(tool_call_parser="none"))
    body = {"input_ids": [1], "tools": TOOLS}
    with Live(config=config) as live:
        assert live.post(CHAT, body).headers["x-ignored-fields"] == "tools"
    config = ServerConfig(api=ApiOptions(tool_call_parser="hermes"))
    with Live(config=config) as live:
        assert "x-ignored-fields" not in live.post(CHAT, body).headers


def test_flags_of_tool_choice_are_flags(live: Live):
    choice = {"type": "auto", "disable_parallel_tool_use": "no"}
    response = live.post(MESSAGE, {**BASES[MESSAGE], "tool_choice": choice})
    assert response.status_code == 400
    words = "tool_choice.disable_parallel_tool_use must be true or false, got 'no'."
    assert response.json()["error"]["message"] == words
