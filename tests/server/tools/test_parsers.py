"""Every parser, on outputs in the exact format of its models, cut up in every way."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from tests.server.tools.formats import FORMATS, SCENARIOS, SCHEMAS

from trunkline.server.openai.pieces import Arguments, Content, Piece, Reasoning, ToolCall
from trunkline.server.openai.tools.base import CallParser, Calls
from trunkline.server.openai.tools.json_list import JsonListParser
from trunkline.server.openai.tools.registry import PARSERS


def parser(name: str, parallel: bool = True) -> CallParser:
    ids = itertools.count()
    calls = Calls(schemas=SCHEMAS, parallel=parallel, new_id=lambda: f"call_{next(ids)}")
    return PARSERS[name](calls)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    result: list[Piece] = []
    for piece in pieces:
        match result[-1] if result else None, piece:
            case Content(text), Content(more):
                result[-1] = Content(text + more)
            case Reasoning(text), Reasoning(more):
                result[-1] = Reasoning(text + more)
            case Arguments(index, text), Arguments(other, more) if index == other:
                result[-1] = Arguments(index, text + more)
            case _:
                result.append(piece)
    return result


def parsed(name: str, chunks: list[str], parallel: bool = True) -> list[Piece]:
    splitter = parser(name, parallel)
    pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)]
    return joined([*pieces, *splitter.end()])


def content(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def calls(pieces: list[Piece]) -> list[tuple[str, str]]:
    begun = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert [call.index for call in begun] == list(range(len(begun)))
    texts = {call.index: "" for call in begun}
    for piece in pieces:
        if isinstance(piece, Arguments):
            texts[piece.index] += piece.text
    return [(call.name, texts[call.index]) for call in begun]


def chunkings(text: str, count: int, seed: int) -> list[list[str]]:
    """The text by characters, and cut at random places."""
    generator = random.Random(seed)
    ways = [list(text)]
    for _ in range(count):
        cuts = sorted(
            generator.sample(range(len(text) + 1), min(len(text), generator.randint(1, 9)))
        )
        ways.append([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])])
    return ways


CASES = [
    pytest.param(name, index, id=f"{name}-{index}")
    for name in FORMATS
    for index in range(len(SCENARIOS))
]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_calls_and_text_come_out_as_they_were_written(name: str, index: int):
    before, wanted, after = SCENARIOS[index]
    pieces = parsed(FORMATS[name].parser, [FORMATS[name].render(before, wanted, after)])
    got = [(called, json.loads(arguments)) for called, arguments in calls(pieces)]
    assert got == wanted
    texts = [before, after if before else after.lstrip()]
    if name.startswith("harmony") and before and after:
        texts[1] = "\n\n" + after.strip()
    assert content(pieces) == "".join(texts)
    assert not any(isinstance(piece, Reasoning) for piece in pieces)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_chunks_do_not_matter(name: str, index: int):
    text = FORMATS[name].render(*SCENARIOS[index])
    whole = parsed(FORMATS[name].parser, [text])
    for chunks in chunkings(text, 20, index):
        assert parsed(FORMATS[name].parser, chunks) == whole


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_text_may_end_anywhere(name: str, index: int):
    """What is cut off has the beginning of what is not, however it was streamed."""
    text = FORMATS[name].render(*SCENARIOS[index])
    whole = calls(parsed(FORMATS[name].parser, [text]))
    streamed = set(random.Random(index).sample(range(len(text)), 5))
    for end in range(len(text)):
        pieces = parsed(FORMATS[name].parser, [text[:end]])
        some = calls(pieces)
        assert [called for called, _ in some] == [called for called, _ in whole[: len(some)]]
        for (_, shorter), (_, longer) in zip(some, whole, strict=False):
            assert longer.startswith(shorter)
        if end in streamed:
            assert parsed(FORMATS[name].parser, list(text[:end])) == pieces


def any_text(generator: random.Random, name: str) -> str:
    """Parts of calls in any order: what a model out of its mind writes."""
    text = "".join(FORMATS[name].render(*generator.choice(SCENARIOS)) for _ in range(2))
    marks = [*PARSERS[FORMATS[name].parser].markers, "{", "}", "[", "]", '"', "(", ":", ",", "\n"]
    marks += ['"name"', "now", '{"name": "now"', "to=functions.now", "```json", "x", "<", "\\"]
    parts = []
    for _ in range(generator.randint(1, 12)):
        start = generator.randrange(len(text))
        parts.append(text[start : start + generator.randint(1, 40)])
        parts.append(generator.choice(marks))
    return "".join(parts)


@pytest.mark.parametrize("name", FORMATS)
def test_nonsense_is_text_and_chunks_do_not_matter(name: str):
    generator = random.Random(7)
    for seed in range(60):
        text = any_text(generator, name)
        whole = parsed(FORMATS[name].parser, [text])
        for chunks in chunkings(text, 5, seed):
            assert parsed(FORMATS[name].parser, chunks) == whole, text


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_content_to_the_character(name: str):
    texts = ["", " \n", "Hello world", "  Hello \n\n world  \n", '{"a": 1}', "[1, 2](x)", "a < b <"]
    for text in [*texts, "See `[f](url)`, {x} and <b>bold</b>.\n", 'print("[x]")', "f(1)", "12"]:
        for chunks in ([text], list(text)):
            pieces = parsed(FORMATS[name].parser, chunks)
            assert pieces == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_unknown_tools_are_content(name: str):
    text = FORMATS[name].render("", [("unknown", {"a": 1})], "")
    for chunks in chunkings(text, 5, 1):
        pieces = parsed(FORMATS[name].parser, chunks)
        assert calls(pieces) == []
        assert content(pieces).strip() == text.strip()


@pytest.mark.parametrize("name", FORMATS)
def test_only_one_call_where_only_one_is_wanted(name: str):
    text = FORMATS[name].render("", [("now", {}), ("get_weather", {"city": "Rom"})], "")
    for chunks in chunkings(text, 5, 1):
        pieces = parsed(FORMATS[name].parser, chunks, parallel=False)
        assert calls(pieces) == [("now", "{}")]
        assert "get_weather" in content(pieces)


def result(pieces: list[Piece]) -> tuple[list[Any], str]:
    return calls(pieces), content(pieces)


@pytest.mark.parametrize(
    ("name", "text", "wanted", "rest"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", "{}")], ""),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>',
         [("now", '{"a": 1}')], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
         [("now", '{"a": 1}')], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>',
         [("now", "{}")], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', [],
         '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>', [("now", "{}")], ""),
        ("hermes", "<tool_call>not json</tool_call>", [], "<tool_call>not json</tool_call>"),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', [], '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>"}}</tool_call>',
         [("now", '{"a": "</tool_call>"}')], ""),
        ("hermes", '<tool_call>{"name": "n\\ud800", "arguments": {}}</tool_call>', [],
         '<tool_call>{"name": "n\\ud800", "arguments": {}}</tool_call>'),
        ("llama3", '{"type": "function", "name": "now", "parameters": {}}', [("now", "{}")], ""),
        ("llama3", '{"answer": {"name": "now"}}', [], '{"answer": {"name": "now"}}'),
        ("llama3", '<|python_tag|>get_weather.call(city="Rom")',
         [("get_weather", '{"city": "Rom"}')], ""),
        ("llama3", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
        ("pythonic", "[get_weather(city='Rom', days=true)]",
         [("get_weather", '{"city": "Rom", "days": true}')], ""),
        ("pythonic", "[get_weather(city='a\nb\\\nc')]",
         [("get_weather", '{"city": "a\\nbc"}')], ""),
        ("pythonic", "[get_weather(city=open('x'))]", [], "[get_weather(city=open('x'))]"),
        ("pythonic", "[get_weather('Rom')]", [], "[get_weather('Rom')]"),
        ("pythonic", "[get_weather(days=1e999)]", [], "[get_weather(days=1e999)]"),
        ("pythonic", "see [now()] there", [("now", "{}")], "see there"),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
         [("now", "{}")], ""),
        ("qwen3_coder", "<function=now>\n</function>", [("now", "{}")], ""),
        ("qwen3_coder",
         "<tool_call>\n<function=run>\n<parameter=dry>\nTrue\n</parameter>\n</function>\n</tool_call>",
         [("run", '{"dry": true}')], ""),
        ("glm", "<tool_call>now</tool_call>", [("now", "{}")], ""),
        ("glm", "<tool_call>run<arg_key>limit</arg_key><arg_value>NaN</arg_value></tool_call>",
         [("run", '{"limit": "NaN"}')], ""),
    ],
)  # fmt: skip
def test_variants(name: str, text: str, wanted: list[tuple[str, str]], rest: str):
    for chunks in ([text], list(text)):
        assert result(parsed(name, chunks)) == (wanted, rest)


def test_a_harmony_answer_has_reasoning_and_content():
    text = (
        "<|channel|>analysis<|message|>Think. More.<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>Again.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    )
    for chunks in chunkings(text, 20, 3):
        assert parsed("gpt-oss", chunks) == [
            Reasoning("Think. More.Again."),
            ToolCall(0, "call_0", "now"),
            Arguments(0, "{}"),
        ]


@pytest.mark.parametrize("kind", [*dict.fromkeys(PARSERS.values()), JsonListParser])
def test_the_example_is_a_call(kind: type[CallParser]):
    schema = {"properties": {"key": {"type": "string"}}}
    splitter = kind(Calls(schemas={"function_name": schema}))
    pieces = joined([*splitter.feed(kind.example), *splitter.end()])
    assert calls(pieces) == [("function_name", '{"key": "value"}')]
    assert content(pieces) == ""
