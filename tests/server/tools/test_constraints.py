"""Calls that must be: what the grammar allows, the parser reads, for any model."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from tests.server.fake_engine import ByteTokenizer
from tests.server.tools.formats import FORMATS, SCENARIOS
from tests.server.tools.grammars import Vocabulary
from tests.server.tools.test_parsers import calls, content, joined

from trunkline.engine.messages import GrammarSpec, SamplingParams
from trunkline.engine.validation import Limits, ParsedSampling, RequestError
from trunkline.server.openai.output import Output, Wishes, plan_output
from trunkline.server.openai.parsers import Parsers
from trunkline.server.openai.pieces import Content, Piece, Reasoning
from trunkline.server.openai.tools.registry import PARSERS

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "run": {
        "type": "object",
        "properties": {
            "code": {"type": "string"},
            "options": {"type": "object"},
            "files": {"type": "array", "items": {"type": "string"}},
            "dry": {"type": "boolean"},
        },
        "required": ["dry"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
# What makes each format the one that its models write.
TEMPLATES = {
    "mistral_named": "[ARGS]",
    "deepseek_v3": "```json",
    "glm45": "<arg_key>{{ k }}</arg_key>\n<arg_value>",
}
LIKE_TEMPLATES = [
    "hermes", "llama3", "mistral_list", "mistral_named", "deepseek_v3", "deepseek_v31", "kimi_k2",
    "qwen3_coder", "glm45", "glm47", "harmony",
]  # fmt: skip


LIMITS = Limits(vocab_size=300, context_length=512)


class Template:
    takes_tools = True
    takes_system = True

    def __init__(self, text: str = "") -> None:
        self.text = text


class Tokenizer(ByteTokenizer):
    """Bytes, and special tokens from 1,000 on."""

    def __init__(self, special: list[str]) -> None:
        self.names = dict(enumerate(special, 1000))

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.names)

    def token_of(self, token_id: int) -> str | None:
        return self.names.get(token_id)


def output(
    name: str,
    special: list[str] | None = None,
    reasoning: str = "none",
    prompt: str = "<assistant>",
    grammar: GrammarSpec | None = None,
    **wishes: Any,
) -> Output:
    form = FORMATS[name]
    if special is None:
        special = list(PARSERS[form.parser].markers)
    template = Template(TEMPLATES.get(name, ""))
    reasoning = "auto" if name == "harmony" else reasoning
    parsers = Parsers.of(form.parser, reasoning, template, Tokenizer(special))
    plan = plan_output(parsers, Wishes(**wishes), LIMITS)
    return plan.for_prompt(prompt, ParsedSampling(SamplingParams(), 1, None, 1, grammar))


def tag(one: Output) -> str:
    spec = one.sampling.grammar
    assert spec is not None
    assert (spec.kind, spec.starts_after) == ("structural_tag", [])
    return spec.text


def pieces(one: Output, text: str) -> list[Piece]:
    splitter = one.splitter()
    return joined([*splitter.feed(text), *splitter.end()])


def fits(wanted: list[tuple[str, Any]]) -> bool:
    """Whether calls follow their schemas, with properties in the schema's order."""
    for name, arguments in wanted:
        if not jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(arguments):
            return False
        order = [key for key in SCHEMAS[name]["properties"] if key in arguments]
        if list(arguments) != order:
            return False
    return True


@pytest.mark.parametrize("name", LIKE_TEMPLATES)
@pytest.mark.parametrize("has_special", [False, True])
def test_what_models_write_is_allowed(name: str, has_special: bool):
    if name == "harmony" and not has_special:
        pytest.skip("the marks of harmony are special tokens")
    special = list(PARSERS[FORMATS[name].parser].markers) if has_special else []
    one = output(name, special, tools=TOOLS, tool_choice="required")
    vocabulary = Vocabulary(special)
    text = tag(one)
    single = name in ("llama3", "harmony")
    checked = 0
    for before, wanted, after in SCENARIOS:
        if before or after or not fits(wanted) or (single and len(wanted) > 1):
            continue
        written = FORMATS[name].render("", wanted, "").strip().removesuffix("<|call|>")
        written = written.replace(', "id": "abc123XYZ"', "")
        assert vocabulary.accepts(text, written), written
        checked += 1
    assert checked >= 4
    for bad in ("", "Hello", "{}", "[]", FORMATS[name].render("", [("no", {})], "").strip()):
        assert not vocabulary.accepts(text, bad)
    broken = FORMATS[name].render("", [("get_weather", {"city": "x", "units": "K"})], "").strip()
    assert not vocabulary.accepts(text, broken)


@pytest.mark.parametrize("name", [*LIKE_TEMPLATES, "python_calls"])
@pytest.mark.parametrize("choice", ["required", "run"])
def test_a_model_of_no_sense_makes_calls_that_validate(name: str, choice: str):
    wanted: Any = choice
    if choice != "required":
        wanted = {"type": "function", "function": {"name": choice}}
    one = output(name, tools=TOOLS, tool_choice=wanted)
    vocabulary = Vocabulary(list(PARSERS[FORMATS[name].parser].markers))
    finished = 0
    for seed in range(12):
        text = vocabulary.sampled(tag(one), seed)
        if text is None:
            continue
        finished += 1
        found = pieces(one, text)
        made = calls(found)
        assert made, text
        assert content(found) == "", text
        for called, arguments in made:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
            assert choice in ("required", called)
        assert choice == "required" or len(made) == 1
    assert finished >= 3


def test_calls_are_a_list_where_their_own_format_cannot_say_what_the_schema_does():
    rule = {"type": "string", "pattern": "^[a-c]{1,3}$"}
    schema = {"type": "object", "properties": {"x": rule}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for name in ("qwen3_coder", "glm47"):
        one = output(name, [], tools=[tool], tool_choice="required")
        vocabulary = Vocabulary([])
        text = '[{"name": "f", "parameters": {"x": "abc"}}]'
        assert vocabulary.accepts(tag(one), text)
        assert not vocabulary.accepts(tag(one), text.replace("abc", "abd"))
        assert calls(pieces(one, text)) == [("f", '{"x": "abc"}')]
        assert calls(pieces(one, text[:-1])) == [("f", '{"x": "abc"}')]


def test_only_one_call_where_parallel_calls_are_forbidden():
    two = FORMATS["hermes"].render("", [("now", {}), ("now", {})], "")
    vocabulary = Vocabulary([])
    many = output("hermes", [], tools=TOOLS, tool_choice="required")
    assert vocabulary.accepts(tag(many), two)
    one = output("hermes", [], tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not vocabulary.accepts(tag(one), two)


STRICT = [
    {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},
    *TOOLS[1:],
]
STRICT_FORMATS = [name for name in LIKE_TEMPLATES if name not in ("llama3", "harmony")]


@pytest.mark.parametrize("name", STRICT_FORMATS)
@pytest.mark.parametrize("has_special", [False, True])
def test_strict_tools_leave_text_free_but_not_calls(name: str, has_special: bool):
    special = list(PARSERS[FORMATS[name].parser].markers) if has_special else []
    text = tag(output(name, special, tools=STRICT))
    vocabulary = Vocabulary(special)
    render = FORMATS[name].render
    good = render("", [("get_weather", {"city": "x"})], "").strip()
    good = good.replace(', "id": "abc123XYZ"', "")
    for fine in (
        "",
        "Just { text } [1] and < so on.\n",
        good,
        "Let me see.\n" + good,
        good + " So.",
    ):
        assert vocabulary.accepts(text, fine), fine
    bad = render("", [("get_weather", {"city": "x", "units": "K"})], "").strip()
    assert not vocabulary.accepts(text, bad)


def test_strict_llama3_and_harmony():
    text = tag(output("llama3", [], tools=STRICT))
    vocabulary = Vocabulary([])
    for fine in ("", "Hello {x}", '{"name": "get_weather", "parameters": {"city": "x"}}'):
        assert vocabulary.accepts(text, fine)
    assert not vocabulary.accepts(text, '{"name": "get_weather", "parameters": {}}')
    marks = list(PARSERS["gpt-oss"].markers)
    text = tag(output("harmony", marks, tools=STRICT))
    call = FORMATS["harmony"].render("", [("get_weather", {"city": "x"})], "")
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    vocabulary = Vocabulary(marks)
    for fine in (call.removesuffix("<|call|>"), "<|channel|>final<|message|>Hi."):
        assert vocabulary.accepts(text, fine)
        assert vocabulary.accepts(text, analysis + fine)
    assert not vocabulary.accepts(text, call.replace('"city"', '"town"').removesuffix("<|call|>"))


def test_strict_pythonic_calls_are_refused():
    with pytest.raises(RequestError, match="strict"):
        output("python_calls", tools=STRICT)


ANSWER = GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')


def test_a_constraint_begins_after_reasoning():
    vocabulary = Vocabulary([])
    possible = tag(output("hermes", [], "qwen3", grammar=ANSWER))
    for fine in ('{"a": 1}', '<think>\nHm {.\n</think>\n\n{"a": 1}', '<think></think>{"a": 1}'):
        assert vocabulary.accepts(possible, fine), fine
    for bad in ("Hm.", "<think>Hm.</think>Yes", "<think>Hm.", '<think>x</think>y</think>{"a": 1}'):
        assert not vocabulary.accepts(possible, bad), bad
    opened = tag(output("hermes", [], "qwen3", "<assistant><think>\n", ANSWER))
    assert vocabulary.accepts(opened, 'Hm.\n</think>\n\n{"a": 1}')
    assert not vocabulary.accepts(opened, '{"a": 1}')
    closed = output("hermes", [], "qwen3", "<think>\n\n</think>\n\n", ANSWER)
    assert closed.sampling.grammar is ANSWER


def test_marks_of_reasoning_may_be_special_tokens():
    marks = ["[THINK]", "[/THINK]"]
    vocabulary = Vocabulary(marks)
    text = tag(output("mistral_list", marks, "mistral", grammar=ANSWER, max_thinking_tokens=3))
    for fine in ('{"a": 1}', '[THINK]Hm.[/THINK]\n{"a": 1}', '[THINK][/THINK]{"a": 1}'):
        assert vocabulary.accepts(text, fine), fine
    for bad in ('[THINK]Hm..[/THINK]{"a": 1}', "[THINK]Hm.[/THINK]Yes", "Hm."):
        assert not vocabulary.accepts(text, bad), bad


def test_calls_after_reasoning():
    one = output("hermes", [], "qwen3", "<think>\n", tools=TOOLS, tool_choice="required")
    call = FORMATS["hermes"].render("", [("now", {})], "")
    assert Vocabulary([]).accepts(tag(one), f"Hm.\n</think>\n\n{call}")
    found = pieces(one, f"Hm.\n</think>\n\n{call}")
    assert isinstance(found[0], Reasoning)
    assert calls(found) == [("now", "{}")]


def test_tools_and_a_response_format_allow_either():
    text = tag(output("hermes", [], grammar=ANSWER, tools=TOOLS))
    call = FORMATS["hermes"].render("", [("now", {})], "")
    vocabulary = Vocabulary([])
    assert vocabulary.accepts(text, call)
    assert vocabulary.accepts(text, '{"a": 1}')
    assert not vocabulary.accepts(text, "Hello")
    with pytest.raises(RequestError, match="excludes a format"):
        output("hermes", grammar=ANSWER, tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("limit", [0, 1, 7])
@pytest.mark.parametrize("prompt", ["<think>\n", ""])
def test_thinking_has_a_limit(limit: int, prompt: str):
    """In tokens, which are bytes here; the answer is free."""
    text = tag(output("hermes", [], "qwen3", prompt, max_thinking_tokens=limit))
    vocabulary = Vocabulary([])
    begin = "" if prompt else "<think>"
    assert vocabulary.accepts(text, f"{begin}{'x' * limit}</think>Yes, {'y' * 50}.")
    assert not vocabulary.accepts(text, f"{begin}{'x' * (limit + 1)}</think>Yes.")
    if not prompt:
        assert vocabulary.accepts(text, "No thoughts at all, just an answer.")


def test_special_tokens_are_seen_only_where_marks_are_special():
    special = ["<|im_end|>", "[TOOL_CALLS]", "<s>"]
    one = output("mistral_list", special, tools=TOOLS)
    assert not one.sampling.sampling.skip_special_tokens
    splitter = one.splitter()
    text = '<s>a <s b<|im_end|> c[TOOL_CALLS][{"name": "now", "arguments": {"x": "<|im_end|>"}}]<s>'
    streamed = list(itertools.chain.from_iterable(splitter.feed(char) for char in text))
    found = joined([*streamed, *splitter.end()])
    assert found == pieces(one, text) or calls(found) == calls(pieces(one, text))
    assert found[0] == Content("a <s b c")
    assert calls(found) == [("now", '{"x": ""}')]
    assert output("mistral_list", ["<s>"], tools=TOOLS).sampling.sampling.skip_special_tokens
    assert output("mistral_list", special).sampling.sampling.skip_special_tokens


def test_grammars_have_a_limit():
    schema = {"type": "object", "properties": {"x": {"enum": ["x" * LIMITS.max_grammar_chars]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(RequestError, match="characters"):
        output("hermes", tools=[tool], tool_choice="required")
    assert output("hermes", tools=[tool]).sampling.grammar is None
