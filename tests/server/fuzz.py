"""Random request bodies: mostly right ones with something wrong, seeded, for any server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import httpx

MESSAGE = {"role": "user", "content": "the fox"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"enum": ["b", 1]}}},
    },
}
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 2,
    "min_new_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "stop": ["zzz"],
    "stop_regex": ["z+y", r"[^\W\d]{40}"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "logit_bias": {"5": 1.5},
    "sampling_seed": 3,
    "n": 2,
    "stream_interval": 2,
    "regex": None,
    "json_schema": None,
    "custom_params": {},
}
SCHEDULING: dict[str, Any] = {
    "rid": "fuzz",
    "stream": True,
    "priority": 0,
    "extra_key": "a",
    "cache_salt": "b",
}
OPENAI: dict[str, Any] = {
    **{name: value for name, value in SAMPLING.items() if name not in ("max_new_tokens",)},
    **SCHEDULING,
    "model": "default",
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "seed": 5,
    "user": "u",
    "best_of": 1,
    "return_token_ids": True,
    "include_stop_str_in_output": True,
    "service_tier": "auto",
    "metadata": {"a": "b"},
    "response_format": {"type": "text"},
}
# Endpoint -> what is always there, and what else may be.
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/generate": (
        {"text": "the fox", "sampling_params": {"max_new_tokens": 2}},
        {
            **SCHEDULING,
            "text": ["the", "fox"],
            "input_ids": [[5, 6], [7]],
            "sampling_params": SAMPLING,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [1, 2],
            "return_text_in_logprobs": True,
            "return_prompt_token_ids": True,
            "lora_path": None,
            "image_data": [],
        },
    ),
    "/v1/chat/completions": (
        {"messages": [MESSAGE], "max_tokens": 2},
        {
            **OPENAI,
            "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, MESSAGE],
            "max_completion_tokens": 2,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "separate_reasoning": True,
            "stream_reasoning": False,
            "logprobs": True,
            "top_logprobs": 2,
            "input_ids": [5, 6],
            "documents": [],
            "reasoning_effort": "low",
            "chat_template_kwargs": {"a": 1},
            "continue_final_message": False,
            "add_generation_prompt": True,
        },
    ),
    "/v1/completions": (
        {"prompt": "the fox", "max_tokens": 2},
        {**OPENAI, "prompt": [[5, 6], [7]], "echo": True, "logprobs": 2, "suffix": ""},
    ),
    "/v1/responses": (
        {"input": "the fox", "max_output_tokens": 2},
        {
            **{name: OPENAI[name] for name in OPENAI if name not in ("n", "response_format")},
            "input": [
                {"role": "system", "content": "a"},
                {"type": "reasoning", "summary": [], "content": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
                {"role": "user", "content": [{"type": "input_text", "text": "the fox"}]},
            ],
            "instructions": "a",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "truncation": "auto",
            "store": False,
            "previous_response_id": None,
            "reasoning": {"effort": "low", "summary": None},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "stream_options": {"include_obfuscation": True},
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ),
    "/v1/messages": (
        {"messages": [MESSAGE], "max_tokens": 2},
        {
            "messages": [
                MESSAGE,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
            ],
            "system": [{"type": "text", "text": "a"}],
            "stop_sequences": ["zzz"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "tools": [{"name": "f", "input_schema": TOOL["function"]["parameters"]}],
            "stream": True,
            "temperature": 0.5,
            "top_k": 5,
        },
    ),
    "/v1/messages/count_tokens": ({"messages": [MESSAGE]}, {"system": "a", "tools": []}),
    "/parse_function_call": (
        {"text": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "tools": [TOOL]},
        {"tool_call_parser": "hermes"},
    ),
    "/separate_reasoning": (
        {"text": "<think>a</think>b", "reasoning_parser": "think"},
        {"reasoning_parser": "kimi"},
    ),
    "/tokenize": (
        {"prompt": "the fox"},
        {
            "prompt": ["the", "fox"],
            "messages": [MESSAGE],
            "add_special_tokens": False,
            "chat_template_kwargs": {},
            "tools": [TOOL],
        },
    ),
    "/detokenize": ({"tokens": [5, 6]}, {"tokens": [[5], [6]], "skip_special_tokens": False}),
    "/abort_request": ({"rid": "nobody"}, {"rid": "fuzz", "abort_all": False}),
}
_LAST_FRAME = re.compile(
    r"(data: \[DONE\]|event: (response\.(completed|incomplete)|message_stop)\ndata: .*)\n\n\Z"
)
_DEEP = re.compile(rb'"deep (list|object) ([0-9]+)"')
ODD: list[Callable[[random.Random], Any]] = [
    lambda _: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice([0, 1, -1, 2, 31, 2**31, 2**63 - 1, -(2**63), 2**64 - 1]),
    lambda r: r.choice([0.0, -0.5, 1e-300, 1e300, 0.1, 2.5, -1e39]),
    lambda r: r.choice(["", "a", "the fox", "\0", "\u202e", "\U0001f600" * 50, "x" * 5000, "1e9"]),
    lambda r: [],
    lambda r: {},
    lambda r: [odd(r) for _ in range(r.randrange(1, 4))],
    lambda r: {r.choice(["", "5", "type", "role", "a" * 300]): odd(r)},
    lambda r: f"deep {r.choice(['list', 'object'])} {r.randrange(1, 990)}",
    lambda r: [r.choice([1, "a", []])] * r.choice([10, 3000]),
]


def odd(source: random.Random) -> Any:
    """A value that hardly any field takes."""
    return source.choice(ODD)(source)


def _nested(match: re.Match[bytes]) -> bytes:
    """What stands for a deep value, written out: `json.dumps` would refuse it."""
    depth = int(match[2])
    opening, closing = (b"[", b"]") if match[1] == b"list" else (b'{"a":', b"}")
    return opening * depth + b"1" + closing * depth


def changed(value: Any, source: random.Random) -> Any:
    """The value with something odd in one place."""
    if isinstance(value, dict) and value and source.random() < 0.8:
        key = source.choice(list(value))
        return {**value, key: changed(value[key], source)}
    if isinstance(value, list) and value and source.random() < 0.6:
        place = source.randrange(len(value))
        return [*value[:place], changed(value[place], source), *value[place + 1 :]]
    return odd(source)


def body(path: str, source: random.Random) -> bytes:
    """A body for an endpoint: right, or wrong in a field or two, or not even JSON."""
    base, others = BODIES[path]
    extra = source.sample(list(others), source.randrange(0, min(6, len(others))))
    fields = {**base, **{name: others[name] for name in extra}}
    for _ in range(source.randrange(3)):
        fields = changed(fields, source)
        if not isinstance(fields, dict):
            break
    raw = bytearray(_DEEP.sub(_nested, json.dumps(fields).encode()))
    if source.random() < 0.1:
        for _ in range(source.randrange(1, 4)):
            raw[source.randrange(len(raw))] = source.randrange(256)
    return bytes(raw)


def fuzz(http: httpx.Client, seed: int) -> tuple[int, str]:
    """Send the body of one seed; the status, and what is wrong with the answer ("" if nothing)."""
    source = random.Random(seed)
    path = source.choice(list(BODIES))
    raw = body(path, source)
    response = http.post(path, content=raw, headers={"content-type": "application/json"})
    return response.status_code, _complaint(response, f"seed {seed}: {path} {raw[:300]!r}")


def _complaint(response: httpx.Response, what: str) -> str:
    if response.status_code == 200:
        text = response.text
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        fine = not streamed or (_LAST_FRAME.search(text) and '"error":{' not in text)
        return "" if fine else f"{what}: a stream ended with {text[-300:]!r}"
    if response.status_code not in (400, 404):
        return f"{what}: status {response.status_code}: {response.text[:300]}"
    answer = response.json()
    if answer.get("type") == "error":
        words = answer["error"]["message"]
        return "" if words and len(words) < 2000 else f"{what}: {answer}"
    named = answer["message"] and answer["error"]["message"] and len(answer["message"]) < 2000
    return "" if named and answer["code"] == response.status_code else f"{what}: {answer}"
