"""Chat templates: what `transformers` renders, what is refused, what hostile ones cannot do."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tests.chat_templates import CHATML, LLAMA3, MISTRAL, PARTS, TEMPLATES
from tests.checkpoints import TinyCheckpoint, write_json
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from trunkline.engine.chat_template import ChatTemplate, ChatTemplateError, TemplateSource
from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.default_model import default_model_path
from trunkline.engine.weights.gguf_file import GgufFile

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ASK = {"role": "user", "content": "  What is 2 + 2?\n"}
SAY = {"role": "assistant", "content": " Four. "}
SYSTEM = {"role": "system", "content": 'Be <brief> & "kind" ß'}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}
    ],
}
RESULT = {"role": "tool", "content": "4"}
CHATS = {
    "one": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [SYSTEM, ASK, SAY, ASK],
    "tools": [ASK, CALL, RESULT, SAY, ASK],
    "reasoning": [ASK, SAY | {"reasoning_content": "\nI count.\n"}, ASK],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": ["<", 1.5, None]}}}]


def compiled(template: str | dict[str, str], **options: Any) -> ChatTemplate:
    templates = {"default": template} if isinstance(template, str) else template
    return ChatTemplate(TemplateSource(templates, "test"), NAMED, **options)


def reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What `transformers` renders."""
    rendered, _ = render_jinja_template(
        [copy.deepcopy(messages)], chat_template=template, **NAMED, **options
    )
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(
    name: str, chat: str, add_generation_prompt: bool, options: dict[str, Any]
) -> None:
    template, messages = TEMPLATES[name], CHATS[chat]
    options = options | {"add_generation_prompt": add_generation_prompt}
    found: list[str] = []
    expected: list[str] = []
    reference_render = partial(reference, template)
    for render, results in (compiled(template).render, found), (reference_render, expected):
        try:
            results.append(render(messages, **options))
        except (jinja2.TemplateError, ChatTemplateError) as error:
            results.append(str(error))
    assert found == expected


@pytest.mark.parametrize("final", ["Four", " Four", "Four ", "Fo\nur\n", " "])
@pytest.mark.parametrize(
    "name", sorted(TEMPLATES.keys() - {"controls"})
)  # which does not end in it
def test_continues_the_final_message_as_transformers_does(name: str, final: str) -> None:
    messages = [ASK, {"role": "assistant", "content": final}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    ours = compiled(TEMPLATES[name]).render(messages, **options)
    assert ours == reference(TEMPLATES[name], messages, **options)
    assert ours.rstrip().endswith(final.strip())


def test_the_last_part_of_a_final_message_is_continued() -> None:
    content = [{"type": "text", "text": "One"}, {"type": "text", "text": "Tw"}]
    messages = [ASK, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    ours = compiled(PARTS).render(messages, **options)
    assert ours == reference(PARTS, messages, **options)
    assert ours.endswith("[text:One][text:Tw")


def test_the_template_of_the_default_model_renders_what_transformers_renders() -> None:
    checkpoint = open_checkpoint(ModelOptions())
    template = GgufFile(default_model_path()).metadata["tokenizer.chat_template"]
    for chat in CHATS.values():
        plain = [{"role": m["role"], "content": m["content"]} for m in chat]
        expected = reference(template, plain, add_generation_prompt=True)
        assert checkpoint.chat_template.render(plain) == expected


def test_which_templates_take_a_system_message() -> None:
    takes = {name: compiled(text).takes_system for name, text in TEMPLATES.items()}
    assert [name for name, does in takes.items() if not does] == ["gemma2"]


def test_messages_are_not_changed() -> None:
    messages = [*CHATS["tools"], SAY | {"reasoning": "so"}]
    before = copy.deepcopy(messages)
    compiled(CHATML).render(messages, tools=TOOLS)
    assert messages == before


def test_arguments_of_tool_calls_may_be_json_text() -> None:
    def chat(arguments: object) -> list[dict[str, Any]]:
        function = {"name": "add", "arguments": arguments}
        return [ASK, {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]

    template = compiled(CHATML)
    assert template.render(chat('{"a": 2}')) == template.render(chat({"a": 2}))
    assert template.render(chat("[1")).count('"[1"') == 1
    assert "tool_call" not in template.render([ASK, SAY | {"tool_calls": None}])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_by_all_its_names(key: str) -> None:
    template = compiled(
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }};"
        "{% endfor %}"
    )
    assert template.render([ASK, SAY | {key: "so"}]) == ";sososo;"


def test_missing_and_null_contents_are_empty() -> None:
    template = compiled("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert template.render([{"role": "user"}, {"role": "user", "content": None}]) == "[][]"


TWO_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "style", "from_parts", "from_text"),
    [
        ("{{ messages[0].content }}", "text", "one two", "one"),
        ("{{ messages[0]['content'] + '!' }}", "text", "one two!", "one!"),
        (
            "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}",
            "parts",
            "<one><two>",
            "<one>",
        ),
        (
            "{% for m in messages %}{% for p in m['content'] | list %}<{{ p.text }}>"
            "{% endfor %}{% endfor %}",
            "parts",
            "<one><two>",
            "<one>",
        ),
        (
            "{% set c = messages[0].content %}{% for p in c %}<{{ p.text }}>{% endfor %}",
            "parts",
            "<one><two>",
            "<one>",
        ),
        (
            "{% set c = messages[0].content %}{% if c is string %}{{ c }}"
            "{% else %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endif %}",
            "parts",
            "<one><two>",
            "one",
        ),
    ],
)
def test_content_parts_are_kept_or_joined_as_the_template_needs(
    template: str, style: str, from_parts: str, from_text: str
) -> None:
    ours = compiled(template)
    assert ours.content_style == style
    assert ours.render([{"role": "user", "content": TWO_PARTS}]) == from_parts
    assert ours.render([{"role": "user", "content": "one"}]) == from_text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url'; this model takes only"),
        ([{"type": "text", "text": "a"}, {"type": "foo"}], r"messages\[0\].content\[1\].*'foo'"),
        ([{"text": "a"}], "has type None"),
        ([{"type": "text", "text": 3}], r"content\[0\].text must be a string"),
        ([7], "has type None"),
        (7, r"messages\[0\].content must be a string or a list"),
        ({"a": 1}, r"messages\[0\].content must be a string or a list"),
    ],
)
def test_contents_that_are_not_understood_are_named(content: object, message: str) -> None:
    for template in (CHATML, PARTS):
        with pytest.raises(ChatTemplateError, match=message):
            compiled(template).render([{"role": "user", "content": content}])


@pytest.mark.parametrize("role", ["bot", None, 3, "", "User"])
def test_unknown_roles_are_named(role: object) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[1\].role is .*; known are system"):
        compiled(CHATML).render([ASK, {"role": role, "content": "x"}])


def test_developer_is_system_unless_the_template_knows_it() -> None:
    developer = [{"role": "developer", "content": "Be kind"}, ASK]
    as_system = [{"role": "system", "content": "Be kind"}, ASK]
    assert compiled(CHATML).render(developer) == compiled(CHATML).render(as_system)
    knowing = (
        "{% for m in messages %}{% if m.role == 'developer' %}D{% else %}{{ m.role }}{% endif %}"
    )
    assert compiled(knowing + "{% endfor %}").render(developer) == "Duser"


def test_a_template_may_know_more_roles() -> None:
    template = compiled("{% for m in messages %}{{ m.role == 'ipython' }}{% endfor %}")
    assert template.render([{"role": "ipython", "content": ""}]) == "True"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([SYSTEM, ASK, ASK], "Conversation roles must alternate user/assistant/..."),
        ([RESULT], "Conversation roles must alternate user/assistant/..."),
        ([ASK, RESULT], "Only user and assistant roles are supported!"),
    ],
)
def test_what_a_template_raises_is_told_in_its_own_words(
    messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ChatTemplateError) as error:
        compiled(MISTRAL).render(messages)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{{ missing() }}",
        "{{ messages[9]['role'] }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ [].pop() }}",
        "{{ strftime_now(3) }}",
        "{{ raise_exception() }}",
    ],
)
def test_whatever_fails_in_a_template_is_a_chat_template_error(template: str) -> None:
    with pytest.raises(ChatTemplateError) as error:
        compiled(template).render([ASK])
    assert str(error.value)
    assert "/" not in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].clear() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{% for i in range(10 ** 8) %}{% endfor %}",
        "{{ ''['__cla' + 'ss__'] }}{{ (''|attr('__class__')) + '' }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    messages = [dict(ASK)]
    try:
        text = compiled(template).render(messages)
    except ChatTemplateError:
        text = ""
    assert messages == [ASK]
    assert "class" not in text
    assert "root:" not in text


def test_the_output_is_bounded() -> None:
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{{ messages[0].content }}"
    template = compiled(endless + "{% endfor %}{% endfor %}", max_output_characters=100_000)
    with pytest.raises(ChatTemplateError, match="longer than 100000 characters"):
        template.render([{"role": "user", "content": "x" * 100}])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_variables_of_the_engine_are_its_own(name: str) -> None:
    # render() itself takes messages, tools and the like by name
    template = compiled("{{ bos_token }}")
    if name == "bos_token":
        with pytest.raises(ChatTemplateError, match="variables bos_token are set by the engine"):
            template.render([ASK], **{name: "x"})
    else:
        with pytest.raises(TypeError):
            template.render([ASK], **{name: "x"}, **{"messages": []})


def test_contradictory_or_empty_chats_are_refused() -> None:
    template = compiled(CHATML)
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        template.render([ASK, SAY], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="messages is empty"):
        template.render([])
    with pytest.raises(ChatTemplateError, match=r"messages\[0\] is not an object"):
        template.render(["hi"])  # type: ignore[list-item]
    with pytest.raises(ChatTemplateError, match="leaves the end of the last message out"):
        compiled("fixed").render(
            [ASK, SAY], continue_final_message=True, add_generation_prompt=False
        )


def test_tools_choose_the_template_named_tool_use() -> None:
    template = compiled({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert template.render([ASK]) == "plain"
    assert template.render([ASK], tools=[]) == "plain"
    assert template.render([ASK], tools=TOOLS) == "1 tools"
    with pytest.raises(ChatTemplateError, match="no chat template named 'default', only rag"):
        compiled({"rag": "x"}).render([ASK])


def test_a_model_without_a_template_says_how_to_give_one(tmp_path: Path) -> None:
    TinyCheckpoint(chat_template=None).write(tmp_path)
    checkpoint = open_checkpoint(ModelOptions(model_path=str(tmp_path)))
    assert not checkpoint.chat_template.exists
    with pytest.raises(ChatTemplateError, match="start the server with --chat-template FILE"):
        checkpoint.chat_template.render([ASK])


def open_template(directory: Path, chat_template: Path | None = None) -> ChatTemplate:
    options = ModelOptions(
        model_path=str(directory), chat_template=str(chat_template) if chat_template else None
    )
    return open_checkpoint(options).chat_template


def test_the_template_comes_from_the_most_specific_place(tmp_path: Path) -> None:
    directory = TinyCheckpoint(chat_template="from the config").write(tmp_path / "model")
    assert open_template(directory).render([ASK]) == "from the config"
    (directory / "chat_template.jinja").write_text("from its file")
    assert open_template(directory).render([ASK]) == "from its file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert open_template(directory).render([ASK], tools=TOOLS) == "with tools"
    (tmp_path / "own.jinja").write_text("from the option {{ bos_token }}")
    own = open_template(directory, tmp_path / "own.jinja")
    assert own.render([ASK], tools=TOOLS) == "from the option <s>"


def test_a_config_may_list_named_templates(tmp_path: Path) -> None:
    directory = TinyCheckpoint().write(tmp_path)
    path = directory / "tokenizer_config.json"
    values = json.loads(path.read_text())
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_json(path, values | {"chat_template": named})
    assert open_template(directory).render([ASK], tools=TOOLS) == "b"
    write_json(path, values | {"chat_template": [{"name": "default"}]})
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template must be"):
        open_template(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read the chat template .*own.jinja"),
        (b"\xff\xfe", r"cannot read the chat template .*own.jinja"),
        (b"ok\n{% if %}", r"own.jinja, default: line 2: "),
        (b"{{ messages | nosuchfilter }}", r"own.jinja, default: line 1: No filter named"),
        (b"{% for m in messages %}", r"own.jinja, default: line 1: Unexpected end"),
    ],
)
def test_a_bad_template_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    directory = TinyCheckpoint().write(tmp_path / "model")
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_template(directory, path)


def test_a_json_file_holds_a_template_under_its_key(tmp_path: Path) -> None:
    directory = TinyCheckpoint().write(tmp_path / "model")
    path = tmp_path / "own.json"
    write_json(path, {"chat_template": "from json {{ eos_token }}"})
    assert open_template(directory, path).render([ASK]) == "from json </s>"
    for content in ({"name": "mine", "user": "USER"}, {"chat_template": 5}, [], None):
        write_json(path, content)
        with pytest.raises(CheckpointError, match=r"own.json has no chat template"):
            open_template(directory, path)
    path.write_text("{{ not json }}")
    with pytest.raises(CheckpointError, match=r"own.json has no chat template"):
        open_template(directory, path)


def test_a_rendered_chat_has_one_bos(tmp_path: Path) -> None:
    directory = TinyCheckpoint(chat_template=LLAMA3).write(tmp_path)
    checkpoint = open_checkpoint(ModelOptions(model_path=str(directory)))
    text = checkpoint.chat_template.render([SYSTEM, ASK, SAY, ASK])
    ids = checkpoint.tokenizer.encode(text, add_special_tokens=False)
    theirs = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template([SYSTEM, ASK, SAY, ASK], add_generation_prompt=True)
    assert ids == expected["input_ids"]
    assert ids[0] == checkpoint.tokenizer.bos_id
    assert ids.count(checkpoint.tokenizer.bos_id) == 1
