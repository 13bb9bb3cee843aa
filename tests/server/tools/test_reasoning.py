"""Reasoning taken apart, however the text is cut up."""

from __future__ import annotations

import pytest
from tests.server.tools.test_parsers import chunkings, joined

from trunkline.server.openai.pieces import Content, Piece, Reasoning
from trunkline.server.openai.reasoning.meter import ReasoningMeter
from trunkline.server.openai.reasoning.registry import PARSERS, detect
from trunkline.server.openai.reasoning.think import Tags, ThinkSplitter

NAMES = [name for name, tags in PARSERS.items() if tags is not None]
THOUGHTS = [
    "One.",
    "Zwei „drei“ 四 👩‍👩‍👧",
    'a "b" \\ <c> </d> {e}',
    "First.\n\nSecond.\n  Third.",
    "1 < 2 and <thin k> or </ think>",
    "",
]
ANSWERS = ["42", "Two\n\nparts.  ", "Ü 語 <b>", '{"a": "</x>"}', ""]


def tags(name: str) -> Tags:
    found = PARSERS[name]
    assert found is not None
    return found


def split(name: str, chunks: list[str], **options: bool) -> list[Piece]:
    splitter = ThinkSplitter(tags(name), **{"is_open": False, **options})
    pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)]
    return joined([*pieces, *splitter.end()])


def wanted(thought: str, answer: str) -> list[Piece]:
    pieces: list[Piece] = [Reasoning(thought)] if thought else []
    return [*pieces, Content(answer)] if answer else pieces


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_and_answer_come_apart(name: str, is_open: bool):
    """As the templates write it: line breaks around the thoughts, one more after them."""
    begin, end = tags(name).begin, tags(name).end
    for number, (thought, answer) in enumerate((t, a) for t in THOUGHTS for a in ANSWERS):
        text = f"\n{thought}\n{end}\n\n{answer}"
        text = text if is_open else begin + text
        for chunks in chunkings(text, 5, number):
            assert split(name, chunks, is_open=is_open) == wanted(thought, answer)


@pytest.mark.parametrize("name", NAMES)
def test_a_tag_in_the_text_and_an_opened_prompt_are_one(name: str):
    text = f"{tags(name).begin}\nSo.{tags(name).end}Yes"
    for chunks in chunkings(text, 10, 1):
        assert split(name, chunks, is_open=True) == [Reasoning("So."), Content("Yes")]


@pytest.mark.parametrize("name", NAMES)
def test_output_without_tags_is_an_answer(name: str):
    begin, end = tags(name).begin, tags(name).end
    for text in ["Hello.", "  Hello.\n", begin[:-1], f"I use {begin} and {end} tags.", "", "\n"]:
        for chunks in ([text], list(text)):
            assert split(name, chunks) == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_may_be_cut_off_anywhere(name: str):
    text = f"{tags(name).begin}\nSome thoughts. \n{tags(name).end}\n\nAn answer."
    for end in range(len(text)):
        whole = split(name, [text[:end]])
        assert split(name, list(text[:end])) == whole
        if len(tags(name).begin) <= end < text.index(tags(name).end):
            assert all(isinstance(piece, Reasoning) for piece in whole)


@pytest.mark.parametrize("name", NAMES)
def test_verbatim_keeps_every_character(name: str):
    text = f"\n{tags(name).begin}\nSome thoughts. \n{tags(name).end}\n\nAn answer. \n"
    for chunks in chunkings(text, 10, 1):
        pieces = split(name, chunks, verbatim=True)
        assert [type(piece) for piece in pieces] == [Reasoning, Content]
        assert pieces[0].text + pieces[1].text == text


def test_a_call_ends_reasoning_where_its_mark_is_a_token():
    for chunks in chunkings("<think>Hm.\n<|x|>call", 10, 1):
        splitter = ThinkSplitter(tags("kimi_k2"), is_open=False, interrupts=("<|x|>",))
        pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)]
        assert joined([*pieces, *splitter.end()]) == [Reasoning("Hm."), Content("<|x|>call")]


def test_prompts_that_end_inside_reasoning():
    think = tags("think")
    assert think.left_open("<|im_start|>assistant\n<think>\n")
    assert not think.left_open("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert not think.left_open("<think>\n\n</think>\n\n")
    assert think.within("<think>so far")
    assert not think.within("<think>done</think> and")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' }}", "think"),
        ("x </think> y", "think"),
        ("◁think▷ ◁/think▷", "kimi"),
        ("[THINK] [/THINK]", "mistral"),
        ("<|channel|>analysis</think>", "gpt-oss"),
        ("plain", None),
    ],
)
def test_the_parser_comes_from_the_template(template: str, name: str | None):
    assert detect(template) == name


class Decoder:
    """Bytes, and the end tag as the token 300; counts how often it is asked."""

    asked = 0

    def __call__(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.asked += 1
        return b"".join(b"</think>" if one == 300 else bytes([one]) for one in ids).decode()


@pytest.mark.parametrize("is_token", [False, True])
def test_reasoning_tokens_are_counted_up_to_the_end_tag(is_token: bool):
    ids = [*b"<think>Hm.", *([300] if is_token else b"</think>"), *b"Yes, </think> indeed."]
    decoder = Decoder()
    meter = ReasoningMeter(["</think>"], frozenset({300} if is_token else {}), decoder)
    assert meter.tokens(ids[:4]) == 0
    meter.see([Reasoning("Hm")])
    assert meter.tokens(ids[:9]) == 9
    meter.see([Reasoning("."), Content("Y")])
    wanted = ids.index(300) + 1 if is_token else len("<think>Hm.</think>")
    assert meter.tokens(ids) == wanted
    asked = decoder.asked
    assert asked <= (0 if is_token else 8)
    assert meter.tokens([*ids, 1, 2]) == wanted
    assert decoder.asked == asked
