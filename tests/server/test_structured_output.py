"""Structured output of a real server with the default model."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from typing import Any

import jsonschema
import psutil
import pytest
from tests.server.grammar_fuzz import grammar_fields
from tests.server.process import Process

CHAT = "/v1/chat/completions"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chat(server: Process, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Describe a person in JSON."}]
    body = {"messages": messages, "temperature": 1.5, "max_tokens": 200, **fields}
    return server.http.post(CHAT, json=body)


def content(response: Any) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}


def engine_process(server: Process) -> psutil.Process:
    found = psutil.Process(server.process.pid).children(recursive=True)
    [engine] = [one for one in found if "trunkline.engine.process" in one.cmdline()]
    return engine


def compiler_process(server: Process) -> psutil.Process:
    found = engine_process(server).children()
    [child] = [one for one in found if "trunkline.engine.grammar.compiler_child" in one.cmdline()]
    return child


def test_a_schema_is_kept_with_and_without_stream(default_server: Process):
    for seed in range(5):
        fields = {"response_format": json_schema(PERSON), "seed": seed}
        whole = content(chat(default_server, **fields))
        jsonschema.validate(json.loads(whole), PERSON)
        body = {"messages": [{"role": "user", "content": "Describe a person in JSON."}], **fields}
        body |= {"temperature": 1.5, "max_tokens": 200, "stream": True}
        with default_server.http.stream("POST", CHAT, json=body) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
        assert "".join(deltas) == whole


def test_the_documented_examples(default_server: Process):
    capital = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[\\w]+$", "maxLength": 12},
            "population": {"type": "integer", "maximum": 99999999},
        },
        "required": ["name", "population"],
    }
    text = content(chat(default_server, response_format=json_schema(capital), temperature=0))
    jsonschema.validate(json.loads(text), capital)
    assert content(chat(default_server, regex="(Paris|London)")) in ("Paris", "London")
    assert content(chat(default_server, ebnf='root ::= "yes" | "no"')) in ("yes", "no")
    text = content(chat(default_server, response_format={"type": "text"}, max_tokens=5))
    assert text
    response = chat(default_server, response_format={"type": "json_object"}, temperature=0)
    if response.json()["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(content(response)), dict)
    body = {"prompt": "A person:", "max_tokens": 100, "json_schema": json.dumps(PERSON)}
    text = default_server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    jsonschema.validate(json.loads(text), PERSON)


def test_structural_tags_of_both_forms(default_server: Process):
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}],
        "triggers": ["<f"],
    }
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}
    tags = {"triggers": ["<f"], "tags": [tag], "at_least_one": True, "stop_after_first": True}
    new = {"type": "structural_tag", "format": {"type": "triggered_tags", **tags}}
    assert chat(default_server, response_format=old, max_tokens=20).status_code == 200
    text = content(chat(default_server, response_format=new))
    found = re.search("<f>(.*)</f>", text, re.DOTALL)
    assert found is not None
    jsonschema.validate(json.loads(found[1]), PERSON)


BAD: list[dict[str, Any]] = [
    {"regex": "(["},
    {"regex": "*a"},
    {"regex": "\u0000"},
    {"ebnf": "root = 3"},
    {"ebnf": ""},
    {"response_format": json_schema({"type": "string", "pattern": "^?[0-9]$"})},
    {"response_format": json_schema({"type": "string", "pattern": "a\u0000"})},
    {"response_format": json_schema({"$ref": "#/$defs/none"})},
    {"response_format": json_schema({"type": "string", "bogus": 1, "contains": "x"})},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ""}}},
    {"response_format": {"type": "banana"}},
    {"response_format": {"type": "structural_tag", "format": {"type": "banana"}}},
    {"response_format": {"type": "structural_tag", "format": {"type": "any_text", "x": 1}}},
    {"regex": "a", "ebnf": 'root ::= "a"'},
]


def test_bad_grammars_are_refused_before_a_stream_begins(default_server: Process):
    engine, compiler = engine_process(default_server).pid, compiler_process(default_server).pid
    for fields in BAD:
        for stream in (False, True):
            response = chat(default_server, **fields, stream=stream)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["message"], fields
    assert engine_process(default_server).pid == engine
    assert compiler_process(default_server).pid == compiler


BOUNDED = [
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    {"type": "string", "enum": ["ä", "日本", 'a"b\\c', "👩‍🚀"]},
    {"const": "né"},
    {"type": "integer", "minimum": 17, "exclusiveMaximum": 21},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
    {"type": "string", "format": "date"},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
]


@pytest.mark.parametrize("schema", BOUNDED, ids=lambda schema: next(reversed(schema)))
def test_no_keyword_is_dropped(default_server: Process, schema: dict[str, Any]):
    whole = {
        "type": "object",
        "properties": {"k": schema},
        "required": ["k"],
        "additionalProperties": False,
    }
    response = chat(default_server, response_format=json_schema(whole), n=10, max_tokens=60)
    if response.status_code == 400:
        assert next(reversed(schema)) in response.text
        return
    checker = jsonschema.Draft202012Validator(whole, format_checker=jsonschema.FormatChecker())
    stopped = [c for c in response.json()["choices"] if c["finish_reason"] == "stop"]
    assert stopped
    for choice in stopped:
        checker.validate(json.loads(choice["message"]["content"]))


def test_blanks_are_bounded(default_server: Process):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    blanks = server_ids(default_server, ["\n", " ", "  ", "\n\n", "\t"])
    bias = {str(token): 20 for token in blanks}
    response = chat(default_server, response_format=json_schema(schema), logit_bias=bias)
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert max(map(len, re.findall(r"\s+", content(response))), default=0) <= 25
    jsonschema.validate(json.loads(content(response)), schema)


def server_ids(server: Process, texts: list[str]) -> list[int]:
    found = [server.http.post("/tokenize", json={"prompt": text}).json() for text in texts]
    return [one["tokens"][0] for one in found if len(one["tokens"]) == 1]


def test_a_grammar_of_few_tokens_has_finite_alternatives(default_server: Process):
    response = chat(default_server, regex="(a|b)", logprobs=True, top_logprobs=5)
    entries = json.loads(response.content, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    for entry in entries["content"]:
        assert len(entry["top_logprobs"]) == 5
        assert entry["logprob"] <= 0


def test_text_that_is_forced_streams_without_replacement_characters(default_server: Process):
    forced = "👨‍👩‍👧‍👦🌶️ é漢字 ďábel  two  spaces"
    for interval in (1, 2, 7):
        body = {
            "text": "Say it:",
            "stream": True,
            "sampling_params": {"regex": forced, "stream_interval": interval, "max_new_tokens": 90},
        }
        with default_server.http.stream("POST", "/generate", json=body) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        texts = [json.loads(line)["text"] for line in lines]
        assert texts[-1] == forced
        assert not any("\ufffd" in text for text in texts)


def test_a_killed_compiler_comes_back(default_server: Process):
    engine = engine_process(default_server).pid
    child = compiler_process(default_server)
    assert child.nice() > 0
    os.kill(child.pid, signal.SIGKILL)
    assert content(chat(default_server, regex="after [0-9]")).startswith("after ")
    assert engine_process(default_server).pid == engine


def test_nothing_waits_for_a_grammar_that_takes_long(default_server: Process):
    ended: list[str] = []
    status: list[int] = []

    def slow() -> None:
        status.append(chat(default_server, ebnf=slow_ebnf(200), max_tokens=3).status_code)
        ended.append("slow")

    thread = threading.Thread(target=slow)
    thread.start()
    time.sleep(0.2)
    for _ in range(3):
        assert chat(default_server, max_tokens=2).status_code == 200
        assert chat(default_server, regex="quick [0-9]", max_tokens=9).status_code == 200
    ended.append("others")
    thread.join()
    assert ended == ["others", "slow"]
    assert status[0] in (200, 400)


def slow_ebnf(count: int) -> str:
    """A grammar whose masks are work: `count` rules that begin a long run of any characters."""
    rules = [f'r{n} ::= [a-z{n % 10}]* "{n}" [^x]* r{n + 1} | [^{n % 10}]+' for n in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "end"'])


def fuzz(server: Process, seeds: range, until: float) -> dict[int, int]:
    """Every answer is a result, or a 400 with a reason; how many there were of each status."""
    engine = engine_process(server).pid
    statuses: dict[int, int] = {}
    for seed in seeds:
        if time.monotonic() > until:
            break
        params = {**grammar_fields(seed), "max_new_tokens": 4, "temperature": 1.0}
        response = server.http.post("/generate", json={"text": "Go", "sampling_params": params})
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        assert response.status_code in (200, 400), (seed, params, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["message"], seed
    assert engine_process(server).pid == engine
    assert server.http.get("/health").status_code == 200
    return statuses


def test_random_grammars(default_server: Process):
    statuses = fuzz(default_server, range(60), time.monotonic() + 20)
    assert statuses.keys() == {200, 400}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_grammars(default_server: Process):
    statuses = fuzz(default_server, range(1000, 6000), time.monotonic() + 600)
    print(statuses)
    assert statuses.keys() == {200, 400}
