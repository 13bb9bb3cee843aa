"""The OpenAPI document says what the endpoints take and give."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.batches.harness import config
from tests.server.fake_engine import VOCAB
from tests.server.live import Live
from tests.server.sse import events

from trunkline.engine import native_request, validation
from trunkline.engine.validation import Limits, RequestError, parse_sampling_params
from trunkline.server import operations
from trunkline.server.openapi import bodies, openapi_document
from trunkline.server.openapi.fields import sampling_params
from trunkline.server.openapi.schemas import Schemas
from trunkline.server.openapi.words import nullable
from trunkline.server.route import JSON, Route, Takes
from trunkline.server.routes import ROUTES

LIMITS = Limits(vocab_size=VOCAB, context_length=512)
DOCUMENT = openapi_document(ROUTES, LIMITS)


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            yield from nodes(one)


def test_every_route_is_described():
    for route in ROUTES:
        described = DOCUMENT["paths"][re.sub(r":\w+}", "}", route.path)]
        for method in (route.methods or set()) - {"HEAD"}:
            operation = described[method.lower()]
            assert operation["summary"].endswith((".", "...")), f"{route.path} needs a docstring"


def test_a_route_without_a_description_is_an_error():
    bare = Route("/bare", operations.health, methods=["GET"])
    with pytest.raises(ValueError, match="/bare does not say what it gives"):
        openapi_document([bare], LIMITS)


def test_the_schemas_are_schemas_and_references_lead_somewhere():
    named = DOCUMENT["components"]["schemas"]
    for schema in named.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = {node["$ref"] for node in nodes(DOCUMENT) if "$ref" in node}
    assert references <= {f"#/components/schemas/{name}" for name in named}
    names = [op["operationId"] for path in DOCUMENT["paths"].values() for op in path.values()]
    assert len(names) == len(set(names))


def says_nothing(typed: dict[str, Any]) -> bool:
    """Whether a type leaves the checking to code: `Any`, or a list of anything or any objects."""
    [kind] = [one for one in typed.get("anyOf", [typed]) if one != {"type": "null"}] or [typed]
    return kind in ({}, {"type": "array"}, {"type": "array", "items": {"type": "object"}})


@pytest.mark.parametrize("takes", [route.description.takes for route in ROUTES])
def test_no_field_is_left_undescribed(takes: Any):
    if takes is None or takes.media_type != JSON:
        return
    [name], schemas = (
        [takes.kind.__name__],
        msgspec.json.schema_components([takes.kind])[1],
    )
    silent = {
        field
        for field, typed in schemas[name]["properties"].items()
        if says_nothing({key: value for key, value in typed.items() if key != "default"})
    }
    assert silent <= takes.fields(LIMITS).keys() | takes.unsupported.keys()


def test_the_described_fields_of_generate_are_those_it_takes():
    assert set(bodies.GenerateFields.__struct_fields__) == native_request.SUPPORTED


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    *(
        st.sampled_from([rule.low, rule.high]).flatmap(
            lambda edge: st.sampled_from([edge, edge - 1, edge + 1, edge + 1e-9])
        )
        for rule in validation.NUMBERS.values()
    ),
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.sampled_from(["", "a", "x" * 1025]),
    st.lists(st.one_of(st.sampled_from(["", "a"]), st.integers(-2, VOCAB - 1)), max_size=3),
    st.sampled_from([["a"] * 32, ["a"] * 33, [1] * 256, [1] * 257, {}, {"a": 1}]),
    st.dictionaries(st.sampled_from(["5", "a", "-1"]), st.integers(-101, 101), max_size=2),
)


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(sorted(validation.SAMPLING_NAMES | {*validation.UNSUPPORTED, "zz"})), ODD)
def test_sampling_schemas_allow_what_is_accepted(name: str, value: Any):
    schema = validator(sampling_params(LIMITS))
    body = {name: value}
    if name == "min_new_tokens":  # else it is also compared with the default of max_new_tokens
        body["max_new_tokens"] = 2**31 - 1
    if isinstance(value, float) and value.is_integer():
        return  # JSON Schema holds 1.0 for an integer; a request must write 1
    try:
        parse_sampling_params(body, limits=LIMITS, defaults={})
        accepted = True
    except RequestError:
        accepted = False
    assert schema.is_valid(body) == accepted


def test_null_is_allowed_once():
    assert nullable({"type": "string"}) == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert nullable(nullable({"type": "string"})) == nullable({"type": "string"})
    assert nullable({}) == {}


class Loose(msgspec.Struct):
    """Says little."""

    value: object
    values: dict[str, object] | None = None
    rows: list[Any] | None = None


def test_object_stands_for_anything():
    schemas = Schemas(LIMITS)
    assert schemas.of(list[object]) == {"type": "array", "items": {}}
    schemas.of_body(Takes(kind=Loose, unsupported={"audio": ()}, bookkeeping=frozenset(("user",))))
    properties = schemas.named["Loose"]["properties"]
    assert properties["value"] == {}
    assert properties["values"]["anyOf"][0]["type"] == "object"
    assert properties["audio"]["enum"] == [None]
    assert "without effect" in properties["user"]["description"]


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "hi"}),
    ("/generate", {"text": ["hi", "ho"], "sampling_params": {"n": 2}}),
    (
        "/generate",
        {
            "input_ids": [1, 2],
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        },
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    ("/v1/completions", {"prompt": ["hi", "ho"], "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": "hi", "stream_options": {"include_usage": True}}),
    (
        "/parse_function_call",
        {
            "text": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    ),
    ("/separate_reasoning", {"text": "<think>a</think>b", "reasoning_parser": "think"}),
    ("/v1/responses", {"input": "hi", "top_logprobs": 2, "metadata": {"a": "b"}}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": []},
                {"role": "assistant", "content": "ho"},
            ],
            "instructions": "be brief",
            "max_output_tokens": 3,
        },
    ),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "system": "be brief",
            "max_tokens": 5,
            "stop_sequences": ["x"],
            "thinking": {"type": "disabled"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/encode", {"text": "hi", "dimensions": 2}),
    ("/encode", {"input_ids": [[1], [2, 3]]}),
    ("/v1/embeddings", {"input": ["hi", "ho"], "encoding_format": "base64", "dimensions": 2}),
    ("/v1/embeddings", {"input": [[1, 2], [3]]}),
    (
        "/v1/score",
        {"query": "hi", "items": ["a", "b"], "label_token_ids": [1, 2], "apply_softmax": True},
    ),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    ("/detokenize", {"tokens": [[104], [105]]}),
    ("/abort_request", {"rid": "x"}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_and_answers_are_as_described(
    live: Live, path: str, body: dict[str, Any], stream: bool
):
    operation = DOCUMENT["paths"][path]["post"]
    content = operation["responses"]["200"].get("content", {})
    if stream and "text/event-stream" not in content:
        return
    sent = {**body, "stream": True} if stream else {**body}
    if not stream:
        sent.pop("stream_options", None)
    validator(operation["requestBody"]["content"][JSON]["schema"]).validate(sent)
    response = live.post(path, sent)
    assert response.status_code == 200, response.text
    if stream:
        schema = content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"]
        is_named = path in ("/v1/responses", "/v1/messages")
        for event in typed_events(response) if is_named else events(response):
            validator(schema).validate(event)
    elif content:
        validator(content[JSON]["schema"]).validate(response.json())


def chat_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def response_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **fields}]}


def message_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {}, **fields}]}


CHAT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
LEAST_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    RESPONSE: {"input": "hi"},
    MESSAGE: {"messages": HI, "max_tokens": 9},
}
NAMED = {"type": "function", "name": "f"}
CHECKED_FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, chat_tool(**fields)) for fields in ({}, {"name": "a b"}, {"name": 5})),
    *((CHAT, chat_tool(strict=value)) for value in (True, None, 1)),
    *((CHAT, chat_tool(parameters=value)) for value in ({}, None, True, [])),
    *((CHAT, {**chat_tool(), "tool_choice": one}) for one in ("auto", "any", {"type": "function"})),
    (CHAT, {**chat_tool(), "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    *((RESPONSE, response_tool(**fields)) for fields in ({}, {"name": "a b"}, {"type": "x"})),
    *((RESPONSE, response_tool(description=value)) for value in ("a", None, 5)),
    *((RESPONSE, {**response_tool(), "tool_choice": one}) for one in ("none", "x", NAMED, {})),
    *(
        (
            RESPONSE,
            {
                **response_tool(),
                "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools},
            },
        )
        for mode, tools in (("auto", [NAMED]), ("auto", []), ("none", [NAMED]), ("required", [5]))
    ),
    *((MESSAGE, message_tool(**fields)) for fields in ({}, {"name": "a b"}, {"type": "bash"})),
    *((MESSAGE, message_tool(input_schema=value)) for value in ({"a": 1}, None, 5)),
    *(
        (MESSAGE, {**message_tool(), "tool_choice": {"type": kind, "name": "f"}})
        for kind in ("auto", "any", "none", "tool", "function")
    ),
    (MESSAGE, {**message_tool(), "tool_choice": {"type": "tool"}}),
    (MESSAGE, {**message_tool(), "tool_choice": "auto"}),
]

FORMATS: list[Any] = [
    None,
    {},
    {"type": "text"},
    {"type": "json_object"},
    {"type": "xml"},
    {"type": "json_schema", "schema": {"type": "object"}, "name": "a", "strict": None},
    {"type": "json_schema", "schema": True},
    {"type": "json_schema", "schema": True, "strict": 1},
    {"type": "json_schema", "schema": True, "other": 1},
    {"type": "json_schema", "json_schema": {"schema": True}},
]
CHECKED_FIELDS += [(RESPONSE, {"text": {"format": one}}) for one in FORMATS]
CHECKED_FIELDS += [(MESSAGE, {"output_config": {"format": one}}) for one in FORMATS]
CHECKED_FIELDS += [(MESSAGE, {"output_format": one}) for one in FORMATS]


@pytest.mark.parametrize(("path", "fields"), CHECKED_FIELDS)
def test_tools_and_formats_are_taken_as_described(live: Live, path: str, fields: dict[str, Any]):
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    body = {**LEAST_BODIES[path], **fields}
    response = live.post(path, body)
    assert response.status_code in (200, 400)
    assert validator(content[JSON]["schema"]).is_valid(body) == (response.status_code == 200)


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/default", "/model_info", "/server_info", "/v1/loads?include=all"],
)
def test_answers_without_a_body_are_as_described(live: Live, path: str):
    operation = DOCUMENT["paths"][path.replace("default", "{name}").partition("?")[0]]["get"]
    schema = operation["responses"]["200"]["content"][JSON]["schema"]
    validator(schema).validate(live.http.get(path).json())


def typed_events(response: httpx.Response) -> list[Any]:
    """The payloads of events that bear names."""
    frames = response.text.split("\n\n")[:-1]
    return [json.loads(frame.split("\ndata: ")[1]) for frame in frames]


def test_stored_responses_are_as_described(live: Live):
    path = "/v1/responses/{response_id}"
    response = live.post("/v1/responses", {"input": "hi", "background": True}).json()
    for below, method in (
        ("", "get"),
        ("/cancel", "post"),
        ("/input_items", "get"),
        ("", "delete"),
    ):
        sent = live.http.request(method.upper(), f"/v1/responses/{response['id']}{below}")
        assert sent.status_code == 200, sent.text
        operation = DOCUMENT["paths"][path + below][method]
        schema = operation["responses"]["200"]["content"][JSON]["schema"]
        validator(schema).validate(sent.json())


def test_files_and_batches_are_as_described(tmp_path: Path):
    batch_line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    content = json.dumps({**batch_line, "body": {"prompt": "hi"}}).encode()
    form = {"purpose": "batch"}
    with Live(config=config(tmp_path)) as live:
        called: list[tuple[str, str, Any]] = []

        def call(path: str, method: str, one: str = "", **options: Any) -> Any:
            url = path.replace("{file_id}", one).replace("{batch_id}", one)
            called.append((path, method, live.http.request(method, url, **options)))
            return called[-1][2].json()

        file = call("/v1/files", "POST", files={"file": ("a.jsonl", content)}, data=form)
        call("/v1/files", "GET")
        call("/v1/files/{file_id}", "GET", file["id"])
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
        takes = DOCUMENT["paths"]["/v1/batches"]["post"]["requestBody"]["content"][JSON]
        validator(takes["schema"]).validate(body)
        batch = call("/v1/batches", "POST", json=body)
        call("/v1/batches/{batch_id}", "GET", batch["id"])
        call("/v1/batches", "GET")
        bad = call("/v1/files", "POST", files={"file": ("a.jsonl", b"nonsense")})
        failed = call("/v1/batches", "POST", json={**body, "input_file_id": bad["id"]})
        while call("/v1/batches/{batch_id}", "GET", failed["id"])["status"] == "validating":
            time.sleep(0.05)
        call("/v1/files/{file_id}", "DELETE", bad["id"])
        live.http.post(f"/v1/batches/{batch['id']}/cancel")
    for path, method, response in called:
        assert response.status_code == 200, response.text
        operation = DOCUMENT["paths"][path][method.lower()]
        schema = operation["responses"]["200"]["content"][JSON]["schema"]
        validator(schema).validate(response.json())


def test_errors_are_as_described(live: Live):
    schema = validator({"$ref": "#/components/schemas/ErrorBody"})
    for response in (live.http.get("/nope"), live.generate(), live.http.get("/generate")):
        assert response.status_code >= 400
        schema.validate(response.json())
    schema = validator({"$ref": "#/components/schemas/MessageError"})
    schema.validate(live.post("/v1/messages", {}).json())


def test_the_document_is_served(live: Live):
    served = live.http.get("/openapi.json").json()
    assert served["paths"].keys() == DOCUMENT["paths"].keys()
    assert str(VOCAB) not in re.findall(r"\d+", str(served["components"]["schemas"]["ChatFields"]))


class Links(HTMLParser):
    """What a page would load, where it leads, and which elements are open at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.targets: set[str] = set()
        self.ids: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "src" or (tag in ("link", "script", "iframe") and name == "href"):
                self.loads.append(value or "")
            elif name == "href" and (value or "").startswith("#"):
                self.targets.add((value or "")[1:])
            elif name == "id":
                self.ids.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(live: Live):
    response = live.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Links()
    page.feed(response.text)
    assert page.loads == []
    assert "url(" not in response.text
    assert "@import" not in response.text
    assert page.targets <= page.ids
    assert page.open == []
    for path in DOCUMENT["paths"]:
        assert f"<code>{path}</code>" in response.text
