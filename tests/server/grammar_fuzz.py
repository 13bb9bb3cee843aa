"""Random grammars, mostly malformed or unreasonable, seeded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_REGEXES = (
    "([a-z]+)-[0-9]{2,4}",
    "^(Paris|London)$",
    r"\d+\.\d*",
    "[^\\]]*é?",
    "(a|b(c|d)*)+",
    "(?=x)[a-f]{3}",
)
_EBNFS = (
    'root ::= "a" root | "b"',
    'root ::= item ("," item)*\nitem ::= [a-z]+ | "[" root "]"',
    'root ::= ("x" | "y"){2,5} [^\\n]*',
    'root ::= (?= "a") other\nother ::= "\\x41" # comment',
)
_KEYWORDS = (
    "type enum const properties required additionalProperties patternProperties items prefixItems "
    "minItems maxItems uniqueItems minLength maxLength pattern format minimum maximum multipleOf "
    "exclusiveMinimum anyOf oneOf allOf not if then else $ref $defs contains propertyNames "
    "dependentRequired unevaluatedProperties minProperties maxProperties description nonsense"
).split()
_TYPES = ("string", "integer", "number", "object", "array", "boolean", "null", "banana", "")
_STRINGS = ("^a+$", "(", "#/$defs/a", "#/nowhere", "http://x/y", "date", "a\0b", "\ud7ff", "")
_NUMBERS = (0, 1, -1, 3, 0.5, 1e308, 10**30, -(10**12), 65536, 2**31)


def grammar_fields(seed: int) -> dict[str, Any]:
    """Sampling parameters with one grammar."""
    rng = random.Random(seed)
    kind = rng.choice(("json_schema", "json_schema", "regex", "ebnf", "structural_tag"))
    return {kind: _MAKERS[kind](rng)}


def _regex(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return "".join(rng.choice(r"ab[](){}|*+?.^$\-,09\dwé") for _ in range(rng.randint(1, 30)))
    if rng.random() < 0.2:
        deep = rng.choice((3, 40, 3000))
        return "(" * deep + "a" + rng.choice(("{9}", "*", "{1,90}")).join([")"] * (deep + 1))[:-1]
    return _mutated(rng, rng.choice(_REGEXES))


def _ebnf(rng: random.Random) -> str:
    if rng.random() < 0.25:
        deep = rng.choice((5, 200, 20_000))
        return rng.choice(
            (
                "root ::= " + "(" * deep + '"a"' + ")" * deep,
                "root ::= " + " | ".join(f'"{n}"' for n in range(min(deep, 2000))),
                "\n".join(
                    ["root ::= r0", *(f"r{n} ::= r{n + 1}?" for n in range(min(deep, 2000)))]
                ),
                f'root ::= ("a"{{{deep}}}){{{deep}}}',
                'root ::= root "a" | "b"',
                'root ::= "" | root root',
            )
        )
    return _mutated(rng, rng.choice(_EBNFS))


def _mutated(rng: random.Random, text: str) -> str:
    characters = list(text)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(characters) + 1)
        action = rng.randrange(3)
        if action == 0:
            characters.insert(at, rng.choice("()[]{}|*+?\\\"'^$:=\0é😀\n9"))
        elif action == 1 and at < len(characters):
            del characters[at]
        else:
            characters[at:at] = characters[: rng.randint(0, 5)]
    return "".join(characters)


def _schema(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        deep = rng.choice((50, 700))
        return '{"items":' * deep + "{}" + "}" * deep
    if rng.random() < 0.1:
        return _mutated(rng, json.dumps(_node(rng, 3)))
    return _node(rng, 3)


def _node(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(({}, True, False, {"type": rng.choice(_TYPES)}, None, 3, "x", []))
    node: dict[str, Any] = {}
    if rng.random() < 0.7:
        node["type"] = rng.choice(_TYPES)
    for keyword in rng.sample(_KEYWORDS, rng.randint(1, 4)):
        node[keyword] = rng.choice(
            (
                lambda: _node(rng, depth - 1),
                lambda: [_node(rng, depth - 1) for _ in range(rng.randint(0, 3))],
                lambda: {name: _node(rng, depth - 1) for name in rng.sample("abcé", 2)},
                lambda: rng.choice(_NUMBERS),
                lambda: rng.choice(_STRINGS),
                lambda: rng.sample("abcd", rng.randint(0, 3)),
            )
        )()
    return node


def _tag(rng: random.Random) -> Any:
    tag: dict[str, Any] = {
        "begin": rng.choice(("<f>", "", 3, {"type": "token", "token": 5})),
        "content": rng.choice(
            (
                {"type": "json_schema", "json_schema": _node(rng, 2)},
                {"type": "regex", "pattern": _regex(rng)},
                {"type": "grammar", "grammar": _ebnf(rng)},
                {"type": "any_text", "max_chars": rng.choice((3, -1, "x"))},
                {"type": rng.choice(("banana", "or")), "elements": []},
            )
        ),
        "end": rng.choice(("</f>", "", [], ["</f>", "]"])),
    }
    tags = {
        "type": "triggered_tags",
        "triggers": rng.choice((["<f"], [""], [], "<")),
        "tags": [tag],
    }
    return rng.choice(
        (
            {"type": "structural_tag", "format": tags},
            {"type": "structural_tag", "format": {"type": "tag", **tag}},
            {"structures": [{"begin": "<f>", "schema": _node(rng, 2), "end": "</f>"}]},
            {"type": "structural_tag", "format": {"type": "star", "content": tags}},
            {"format": None},
        )
    )


_MAKERS: dict[str, Callable[[random.Random], Any]] = {
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "structural_tag": _tag,
}
