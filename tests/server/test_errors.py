"""What is wrong is a 4xx with a JSON body, the same for streams, and harms nobody else."""

import json
import socket
import tracemalloc
from collections import deque
from itertools import repeat
from typing import Any

import httpx
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live
from tests.server.sse import events

from trunkline.engine.messages import Refused
from trunkline.engine.validation import RequestError
from trunkline.server import connections, early_answers
from trunkline.server.http import decode_json

GENERATE, CHAT, COMPLETION = "/generate", "/v1/chat/completions", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    GENERATE: {"text": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
}
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "what is this?"}


def messages(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


BAD_FIELDS = [
    (GENERATE, {"sampling_params": {"temperature": -1}}, "temperature", "non-negative finite"),
    (GENERATE, {"sampling_params": {"banana": 1}}, "banana", "unknown sampling parameter"),
    (GENERATE, {"sampling_params": {"n": 10**12}}, "n", "[1, 128]"),
    (GENERATE, {"sampling_params": {"regex": ["a"]}}, "regex", "must be a string"),
    (GENERATE, {"sampling_params": {"ebnf": "a" * 300_000}}, "ebnf", "at most 262144 characters"),
    (GENERATE, {"sampling_params": {"json_schema": [1]}}, "json_schema", "JSON object or its text"),
    (
        GENERATE,
        {"sampling_params": {"json_schema": "{}", "regex": "a"}},
        "regex",
        "only one of json_schema, regex, ebnf, structural_tag may be given",
    ),
    (GENERATE, {"text": ["a", ""]}, "text[1]", "text[1] is empty"),
    (GENERATE, {"text": ""}, "text", "text is empty"),
    (GENERATE, {"text": []}, "text", "1 to 2048 rows, got 0"),
    (GENERATE, {"text": None, "input_ids": []}, "input_ids", "input_ids is empty"),
    (GENERATE, {"text": None, "input_ids": [[1, 2], []]}, "input_ids[1]", "input_ids[1] is empty"),
    (GENERATE, {"text": "x" * 600}, "text", "longer than the model's context length of 512"),
    (GENERATE, {"text": ["a", "x" * 10_000]}, "text[1]", "10000 characters, which are more tokens"),
    (COMPLETION, {"prompt": "x" * 10_000}, "prompt", "10000 characters, which are more tokens"),
    (CHAT, messages(("user", "x" * 10_000)), "messages", "context length of 512 tokens"),
    (GENERATE, {"rid": "x" * 10_000}, "rid", "1 to 256"),
    (CHAT, {"temperature": "0.7"}, "temperature", "non-negative finite"),
    (CHAT, {"top_p": 2}, "top_p", "(0, 1]"),
    (CHAT, {"seed": 2**63}, "seed", "64-bit integer"),
    (CHAT, {"seed": "a"}, "seed", "64-bit integer"),
    (CHAT, {"top_k": -2}, "top_k", "-1 (disable)"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "[0.000001, 2]"),
    (CHAT, {"logit_bias": {"99999999": 5}}, "logit_bias", "[0, 300)"),
    (CHAT, {"logit_bias": {"-1": 5}}, "logit_bias", "[0, 300)"),
    (CHAT, {"logit_bias": {"abc": 1}}, "logit_bias", "[0, 300)"),
    (CHAT, {"logit_bias": {"5": 1e9}}, "logit_bias", "[-100, 100]"),
    (CHAT, {"stop": ""}, "stop", "1 to 1024 characters"),
    (CHAT, {"stop": [""]}, "stop", "1 to 1024 characters"),
    (CHAT, {"stop": ["x", ""]}, "stop", "1 to 1024 characters"),
    (CHAT, {"stop": ["x"] * 500_000}, "stop", "at most 32 strings"),
    (CHAT, {"n": 100_000}, "n", "[1, 128]"),
    (CHAT, {"top_logprobs": False}, "top_logprobs", "needs logprobs"),
    (CHAT, {"max_tokens": -1}, "max_tokens", "max_tokens must be"),
    (CHAT, {"max_completion_tokens": "9"}, "max_completion_tokens", "max_completion_tokens must"),
    (CHAT, {"min_tokens": 9, "max_tokens": 5}, "min_tokens", "[0, max_tokens(5)], got 9"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    (CHAT, {"logprobs": 5}, "logprobs", "must be true or false, got 5"),
    (CHAT, {"messages": []}, "messages", "1 to 16384 entries, got 0"),
    (CHAT, {"messages": "hi"}, "messages", "must be a list, got 'hi'"),
    (CHAT, messages(("bot", "hi")), "messages[0].role", "must be one of"),
    (CHAT, messages(("user", None)), "messages[0].content", "got null"),
    (CHAT, messages(("user", 5)), "messages[0].content", "got 5"),
    (CHAT, messages(("user", [TEXT, PNG])), "messages[0].content[1]", "'image_url'"),
    (CHAT, messages(("user", [PNG])), "messages[0].content[0]", "'image_url'"),
    (CHAT, messages(("user", [{"type": "input_audio"}])), "messages[0].content[0]", "input_audio"),
    (CHAT, messages(("user", [{"type": "foo"}])), "messages[0].content[0]", "'foo'"),
    (CHAT, messages(("user", ["text"])), "messages[0].content[0]", "None"),
    (CHAT, messages(("user", "refuse me")), "messages", "roles must alternate"),
    (
        CHAT,
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "must be an object with a schema",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ""}}},
        "response_format.json_schema.schema",
        "must be a JSON Schema",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema",
        "strict must be true or false",
    ),
    (CHAT, {"response_format": {"type": "banana"}}, "response_format.type", "must be one of"),
    (CHAT, {"response_format": "json_object"}, "response_format", "must be an object"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "schema": {}}},
        "response_format",
        "unknown key 'schema'; it takes type and json_schema, and that takes schema",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"properties": {}}}},
        "response_format.json_schema",
        "unknown key 'properties'; it takes name, description, schema and strict",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "regex": "a"},
        "response_format",
        "cannot both say",
    ),
    (CHAT, {"guided_regex": "a"}, "guided_regex", "not supported: use regex."),
    (CHAT, {"structured_outputs": {"json": {}}}, "structured_outputs", "use response_format"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    (CHAT, {"structured_outputs": {"json": {}}}, "structured_outputs", "not supported"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    (CHAT, {"model": 5}, "model", "must be a string"),
    (CHAT, {"priority": 3}, "priority", "--schedule-policy priority"),
    (COMPLETION, {"prompt": ""}, "prompt", "prompt is empty"),
    (COMPLETION, {"prompt": [""]}, "prompt[0]", "prompt[0] is empty"),
    (COMPLETION, {"prompt": []}, "prompt", "prompt is empty"),
    (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty"),
    (COMPLETION, {"prompt": [0, 99_999_999]}, "prompt", "[0, 300), got 99999999"),
    (COMPLETION, {"prompt": [-1]}, "prompt", "got -1"),
    (COMPLETION, {"prompt": [1.5]}, "prompt", "got 1.5"),
    (COMPLETION, {"prompt": [True]}, "prompt", "got True"),
    (COMPLETION, {"prompt": [2**63]}, "prompt", "got 9223372036854775808"),
    (COMPLETION, {"prompt": ["a", 5]}, "prompt[1]", "must be a string"),
    (COMPLETION, {"prompt": 5}, "prompt", "must be a string, a list"),
    (COMPLETION, {"prompt": None}, "prompt", "must be a string, a list"),
    (COMPLETION, {"prompt": ["a"] * 3000}, "prompt", "at most 2048 rows"),
    (COMPLETION, {"prompt": ["a"] * 100, "n": 100}, "n", "in all"),
    (COMPLETION, {"max_tokens": -1}, "max_tokens", "max_tokens must be"),
    (COMPLETION, {"suffix": "x"}, "suffix", "not supported"),
    (COMPLETION, {"best_of": 3}, "best_of", "must be equal to n (1)"),
    (COMPLETION, {"logprobs": 50}, "logprobs", "[0, 20]"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), BAD_FIELDS)
def test_a_bad_field_is_named_with_and_without_stream(
    live: Live, path: str, fields: dict[str, Any], param: str, words: str
):
    bodies = []
    for stream in (False, True):
        response = live.post(path, {**BASE[path], **fields, "stream": stream})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        bodies.append(response.json())
    assert bodies[0] == bodies[1]
    body = bodies[0]
    assert body["error"]["param"] == body["param"] == param
    assert words in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    assert (body["object"], body["message"]) == ("error", body["error"]["message"])
    assert body["code"] == 400
    assert len(body["message"]) < 500


RAW = [
    (b'{"text": "hi", "sampling_params": {"temperature": NaN}}', "sampling_params.temperature"),
    (b'{"text": "hi", "sampling_params": {"top_p": Infinity}}', "sampling_params.top_p"),
    (b'{"text": "hi", "sampling_params": {"logit_bias": {"5": -Infinity}}}', "logit_bias.5"),
    (b'{"text": "hi", "sampling_params": {"seed": 18446744073709551616}}', "64-bit integer"),
    (b'{"text": "hi", "sampling_params": {"temperature": 1e999}}', "not valid JSON"),
    (b"{:", "not valid JSON"),
    (b"", "not valid JSON"),
    (b"NaN", "the body must be a finite number"),
    (b"[" * 100_000, "not valid JSON"),
    (b"[" * 100_000 + b"NaN", "not valid JSON"),
    ('{"text": "你好"}'.encode("gbk"), "not valid JSON"),
    (b'{"text": "\\ud800"}', "not valid JSON"),
    (b"[]", "the body must be a JSON object, got []."),
    (b"null", "the body must be a JSON object, got None."),
]


@pytest.mark.parametrize(("raw", "words"), RAW)
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_raw_bodies(live: Live, path: str, raw: bytes, words: str):
    headers = {"content-type": "application/json"}
    response = live.http.post(path, content=raw, headers=headers)
    assert response.status_code == 400
    json.loads(response.content, parse_constant=lambda name: pytest.fail(name))
    if path == "/generate":
        assert words in response.json()["error"]["message"]
    assert live.generate(text="x").status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETION, "/tokenize"])
def test_the_content_type_must_be_json(live: Live, path: str, kind: str | None):
    headers = {} if kind is None else {"content-type": kind}
    response = live.http.post(path, content=b'{"text": "x"}', headers=headers)
    assert response.status_code == 400
    assert "Content-Type must be application/json" in response.json()["error"]["message"]


def test_who_is_answered_before_the_body_came_is_told_of_the_close(live: Live):
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 400")
    assert b"connection: close" in head
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"connection: close" not in connection.recv(65536).lower()


def test_a_charset_may_be_given(live: Live):
    headers = {"content-type": "application/json; charset=utf-8"}
    assert live.http.post("/generate", content=b'{"text":"x"}', headers=headers).status_code == 200


@pytest.mark.parametrize("path", [GENERATE, "/nope", "/health"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_a_huge_body_sees_its_answer(live: Live, path: str, chunked: bool):
    """Declared or not, and where nothing reads it; clients read when they have sent everything."""
    block = b"x" * (1 << 20)
    piece = b"%x\r\n%s\r\n" % (len(block), block) if chunked else block
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {64 << 20}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(head.encode())
        for _ in range(64):
            connection.sendall(piece)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    status = {GENERATE: 413, "/nope": 404, "/health": 405}[path]
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
    assert answer.endswith(b"}")


def test_an_http_2_client_sees_its_answer_while_it_sends(live: Live):
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    head = {":method": "POST", ":path": "/nope", ":scheme": "http", ":authority": "x"}
    client.send_headers(1, list(head.items()))
    answer = b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        while b"there is no /nope" not in answer:
            connection.sendall(client.data_to_send())
            for event in client.receive_data(connection.recv(1 << 16)):
                answer += event.data if isinstance(event, DataReceived) else b""


def test_an_http_2_client_that_never_stops_sending_is_cut_off(
    live: Live, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(early_answers, "LINGER_S", 0.3)
    with httpx.Client(base_url=live.url, http1=False, http2=True, timeout=20) as client:
        with pytest.raises(httpx.TransportError):
            client.post("/nope", content=repeat(b"x" * 65536))
        assert client.post(GENERATE, json={"text": "x"}).status_code == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("path", "status"), [(GENERATE, 413), ("/nope", 404), ("/health", 405)])
def test_an_early_answer_leaves_an_http_2_connection_whole(live: Live, path: str, status: int):
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=live.url, http1=False, http2=True, timeout=20) as client:
        response = client.post(path, content=repeat(b"x" * 65536, 640), headers=headers)
        assert response.status_code == status
        assert client.post(GENERATE, json={"text": "x"}).status_code == 200


def test_a_client_whose_headers_are_too_large_sees_its_answer(live: Live):
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for number in range(64):
            connection.sendall(b"x-%d: %s\r\n" % (number, b"x" * (1 << 16)))
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]


def test_a_client_that_never_stops_sending_is_cut_off(live: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "LINGER_S", 0.3)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n"
        connection.sendall(head.encode())
        endless = iter(lambda: connection.sendall(b"x" * 65536), "never")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            deque(endless, maxlen=0)


def test_too_long_a_body_is_413(live: Live):
    response = live.post("/generate", {"text": "x" * (33 << 20)})
    assert response.status_code == 413
    assert "--max-body-bytes" in response.json()["error"]["message"]


def test_unknown_paths_and_methods(live: Live):
    assert live.http.get("/nope").json()["error"]["message"] == "there is no /nope"
    for path, meant in {
        "/chat/completions": "/v1/chat/completions",
        "/v1/v1/completions": "/v1/completions",
        "/healthz": "/health",
    }.items():
        message = live.http.get(path).json()["message"]
        assert message == f"there is no {path}; did you mean {meant}?"
    response = live.http.get("/generate")
    assert response.status_code == 405
    assert response.json()["message"] == "/generate takes POST or PUT, not GET"
    assert set(response.headers["allow"].split(", ")) == {"POST", "PUT"}
    assert live.http.get("/v1/models/org%2Fother").status_code == 404
    response = live.http.put("/v1/files")
    assert response.json()["message"] == "/v1/files takes POST or GET, not PUT"
    assert set(response.headers["allow"].split(", ")) == {"POST", "GET", "HEAD"}


@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_status_before_any_stream(path: str, stream: bool):
    with Live() as live:
        live.engine.refuse = Refused(0, 503, "queue_full", "The request queue is full.", None)
        response = live.post(path, {**BASE[path], "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"] == {
            "message": "The request queue is full.",
            "type": "server_error",
            "param": None,
            "code": "queue_full",
        }


@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETION])
def test_a_failed_row_is_an_error(path: str):
    with Live(FakeEngine(fail_after=3, delay_s=0.005)) as live:
        response = live.post(path, BASE[path])
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "logits are not finite"
        payloads = events(live.post(path, {**BASE[path], "stream": True}), done=False)
        assert payloads[-1]["error"]["message"] == "logits are not finite"
        assert payloads[-1]["code"] == 500
        assert "error" not in payloads[0]


@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETION])
def test_the_engine_dies_and_the_stream_goes_on(path: str):
    with Live(FakeEngine(delay_s=0.02)) as live:
        whole = live.post(path, {**BASE[path], "stream": True}).text
        with live.http.stream("POST", path, json={**BASE[path], "stream": True}) as response:
            chunks = response.iter_text()
            text = next(chunks) + next(chunks)
            live.call(live.engine.kill)
            for stream in (False, True):
                refused = live.post(path, {**BASE[path], "stream": stream})
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_unavailable"
            assert live.http.get("/health").status_code == 503
            live.call(live.engine.restart)
            text += "".join(chunks)
        assert [shape(one) for one in frames(text)] == [shape(one) for one in frames(whole)]
        assert live.post(path, BASE[path]).status_code == 200


def frames(text: str) -> list[object]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def shape(payload: Any) -> object:
    """A payload without what differs between two equal requests."""
    match payload:
        case {"choices": choices}:
            return choices
        case {"text": said, "output_ids": ids}:
            return said, ids
    raise AssertionError(payload)


@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETION])
def test_the_engine_dies_for_good(path: str):
    with Live(FakeEngine(delay_s=0.02)) as live:
        with live.http.stream("POST", path, json={**BASE[path], "stream": True}) as response:
            chunks = response.iter_text()
            next(chunks)
            live.call(lambda: live.engine.set_status("dead", "the supervision has failed"))
            rest = "".join(chunks)
        assert "the supervision has failed" in rest
        assert "[DONE]" not in rest


def test_the_same_rid_twice_in_flight():
    with Live(FakeEngine(hold=True)) as live:
        with live.http.stream("POST", "/generate", json={"text": "x", "rid": "a", "stream": True}):
            response = live.generate(text="y", rid="a")
            assert response.status_code == 400
            assert "Duplicate request ID detected" in response.json()["error"]["message"]
            assert live.post("/abort_request", {"rid": "a"}).status_code == 200
        live.engine.hold = False
        assert live.generate(text="y", rid="a").status_code == 200


def test_a_nan_is_named_in_memory_in_proportion_to_the_body():
    depth = 400
    body = (b'{"' + b"k" * 80 + b'":') * depth + b"[NaN," + b"1," * 10_000 + b"1]" + b"}" * depth
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"k must be a finite number|k+\.k+") as caught:
            decode_json(body)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert len(caught.value.message) < 400


def test_in_a_long_body_a_nan_has_a_place():
    with pytest.raises(RequestError, match=r"not valid JSON: .*line 1 column 2 "):
        decode_json(b"[NaN," + b"1," * 50_000 + b"1]")
