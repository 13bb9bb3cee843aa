from itertools import pairwise

import pytest
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.live import Live
from tests.server.sse import events, texts


def by_prompt(prompt: list[int], sample: int) -> str:
    return f"{bytes(prompt).decode()}:{sample}"


def test_the_answer(live: Live):
    body = live.completion("hi", max_tokens=5).json()
    assert list(body) == (
        "id object created model system_fingerprint choices usage metadata".split()
    )
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ]


def test_sixteen_tokens_by_default():
    with Live(FakeEngine(answer=lambda prompt, sample: "x" * 100)) as live:
        assert live.completion().json()["usage"]["completion_tokens"] == 16
        assert live.completion(max_tokens=None).json()["usage"]["completion_tokens"] == 16
        assert live.completion(max_tokens=0).json()["usage"]["completion_tokens"] == 0
        one = live.completion(max_tokens=1).json()
        assert (one["usage"]["completion_tokens"], one["choices"][0]["text"]) == (1, "x")


@pytest.mark.parametrize(
    "prompt", ["ab", ["ab"], [97, 98], [[97, 98]]], ids=["text", "texts", "ids", "lists"]
)
def test_the_forms_of_a_prompt(live: Live, prompt: object):
    assert live.completion(prompt).status_code == 200
    assert live.engine.submitted[-1].prompt == [97, 98]


def test_indices_are_prompt_by_prompt():
    with Live(FakeEngine(answer=by_prompt)) as live:
        fields = {"prompt": ["A B", "C D"], "n": 2, "max_tokens": 6, "temperature": 0}
        whole = live.completion(**fields).json()
        expected = {0: "A B:0", 1: "A B:1", 2: "C D:0", 3: "C D:1"}
        assert {choice["index"]: choice["text"] for choice in whole["choices"]} == expected
        assert whole["usage"]["prompt_tokens"] == 6
        assert whole["usage"]["completion_tokens"] == 24
        options = {"stream_options": {"include_usage": True}}
        chunks = events(live.completion(**fields, stream=True, **options))
        assert texts(chunks) == expected
        assert chunks[-1]["usage"] == whole["usage"]
        reasons = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
        assert sorted(choice["index"] for choice in reasons) == [0, 1, 2, 3]
        assert {c["id"] for c in chunks} == {chunks[0]["id"]}


def test_echo(live: Live):
    assert live.completion("hi ", echo=True).json()["choices"][0]["text"] == "hi Hello world"
    ids = live.completion([104, 105], echo=True, stream=True)
    assert texts(events(ids)) == {0: "hiHello world"}
    nothing = live.completion("hi", echo=True, max_tokens=0).json()
    assert nothing["choices"][0]["text"] == "hi"
    assert nothing["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probs(live: Live, stream: bool):
    fields = {"prompt": "\n1. C", "echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}
    if stream:
        text, block = "", {}
        for chunk in events(live.completion(**fields, stream=True)):
            [choice] = chunk["choices"]
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                block[name] = [*block.get(name, []), *values]
    else:
        [choice] = live.completion(**fields).json()["choices"]
        text, block = choice["text"], choice["logprobs"]
    assert {len(values) for values in block.values()} == {5 + 5}
    assert block["token_logprobs"][0] is block["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in block["token_logprobs"][1:])
    assert "".join(block["tokens"]) == text == "\n1. CHello"
    assert block["text_offset"][0] == 0
    assert all(earlier <= later for earlier, later in pairwise(block["text_offset"]))
    for token, offset in zip(block["tokens"], block["text_offset"], strict=True):
        assert text[offset:].startswith(token)


def test_log_probs_of_the_prompt_alone(live: Live):
    fields = {"prompt": [104, 105], "echo": True, "logprobs": 1, "max_tokens": 0}
    [choice] = live.completion(**fields).json()["choices"]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.105]


def test_log_probs_without_alternatives(live: Live):
    [choice] = live.completion(logprobs=0, max_tokens=2).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.072, -0.101]
    assert choice["logprobs"]["top_logprobs"] == [None, None]


def test_ignore_eos_and_stop(live: Live):
    longer = live.completion(ignore_eos=True, max_tokens=20).json()
    assert longer["usage"]["completion_tokens"] == 20
    assert longer["choices"][0]["finish_reason"] == "length"
    stopped = live.completion(stop=["\n\n", "wor"]).json()["choices"][0]
    assert (stopped["text"], stopped["matched_stop"]) == ("Hello ", "wor")
    by_id = live.completion(stop_token_ids=[ord("o")]).json()["choices"][0]
    assert by_id["matched_stop"] == ord("o")
    ended = live.completion().json()["choices"][0]
    assert (ended["finish_reason"], ended["matched_stop"]) == ("stop", EOS)


def test_clients_explicit_defaults(live: Live):
    response = live.completion(
        ["hi"], logprobs=None, seed=None, n=1, best_of=1, frequency_penalty=0, presence_penalty=0,
        top_p=1, max_tokens=256, suffix=None, user=None, stop=None,
    )  # fmt: skip
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_of_the_text(stream: bool):
    """Also where tokens are parts of characters, or special ones that the text does not show."""
    answer = "👩‍👧é x漢"
    with Live(FakeEngine(answer=lambda prompt, sample: answer)) as live:
        fields = {"echo": True, "logprobs": 0, "stream": stream, "max_tokens": 100}
        response = live.completion([EOS, *"aé漢b".encode()], **fields)
        choices = (
            [chunk["choices"][0] for chunk in events(response)]
            if stream
            else response.json()["choices"]
        )
    text = "".join(choice["text"] for choice in choices)
    assert text == "aé漢b" + answer
    blocks = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for block in blocks for offset in block["text_offset"]]
    tokens = [token for block in blocks for token in block["tokens"]]
    expected = [index for index, char in enumerate(text) for _ in char.encode()]
    assert offsets == [0, *expected, len(text)]
    for token, offset in zip(tokens[1:-1], offsets[1:-1], strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or text[offset:].startswith(token)
