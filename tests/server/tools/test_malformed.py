"""Malformed tools and chats: refused with a reason, or understood, and nothing else."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from tests.server.fake_engine import ByteTokenizer
from tests.server.tools.test_constraints import LIMITS, TEMPLATES, TOOLS, Template

from trunkline.engine.chat_template import ChatTemplate, TemplateSource
from trunkline.engine.messages import SamplingParams
from trunkline.engine.validation import ParsedSampling, RequestError
from trunkline.server.openai.chat_shapes import whole_message
from trunkline.server.openai.messages import check_messages
from trunkline.server.openai.output import Wishes, plan_output
from trunkline.server.openai.parsers import Parsers
from trunkline.server.openai.tools.registry import PARSERS

CHAT = [
    {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "12:00"},
]
WHOLE = {
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "run"}},
    "messages": CHAT,
}
ODD: list[Any] = [None, True, 0, -1, 1.5, "", "x", "object", [], {}, [[]], {"a": {}}, ["a"] * 3]
PLAIN = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"


def places(value: Any) -> list[tuple[Any, Any]]:
    """All containers in a value, with each of their keys."""
    found: list[tuple[Any, Any]] = []
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in entries:
        found.append((value, key))
        if isinstance(one, dict | list):
            found += places(one)
    return found


def spoiled(generator: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(WHOLE)
    for _ in range(generator.randint(1, 3)):
        container, key = generator.choice(places(body))
        what = generator.random()
        if what < 0.2 and isinstance(container, dict):
            del container[key]
        elif what < 0.4 and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        else:
            container[key] = copy.deepcopy(generator.choice(ODD))
    return body


@pytest.mark.parametrize("name", {kind: name for name, kind in PARSERS.items()}.values())
def test_malformed_bodies_are_refused_or_understood(name: str):
    generator = random.Random(name)
    parsers = Parsers.of(name, "auto", Template(TEMPLATES["glm45"]), ByteTokenizer())
    template = ChatTemplate(TemplateSource({"default": PLAIN}, "test"), {})
    sampling = ParsedSampling(SamplingParams(), 1, None, 1)
    understood, reasons = 0, set()
    for _ in range(300):
        body = spoiled(generator)
        choice = generator.choice(["auto", "required", body.get("tool_choice")])
        try:
            wishes = Wishes(tools=body.get("tools"), tool_choice=choice)
            plan = plan_output(parsers, wishes, LIMITS)
            messages = body.get("messages")
            if isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
                check_messages(messages)
                chat = plan.chat(messages)
                template.render(chat.messages, tools=chat.tools)
            output = plan.for_prompt("<assistant>", sampling)
            if output.sampling.grammar is not None:
                json.loads(output.sampling.grammar.text)
            splitter = output.splitter()
            whole_message([*splitter.feed('<tool_call>{"name": "run"'), *splitter.end()])
        except RequestError as error:
            reasons.add(error.message)
        else:
            understood += 1
    assert len(reasons) > 10
    assert 30 < understood < 300
