"""Malformed schemas and expressions: a grammar that xgrammar reads, or a refusal."""

import random
from contextlib import suppress
from typing import Any

import pytest
import xgrammar

from trunkline.engine.grammar.schema import (
    RegexError,
    SchemaError,
    regex_grammar,
    schema_grammar,
)

KEYWORDS = """
    type const enum multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength
    pattern maxItems minItems uniqueItems maxContains minContains contains prefixItems items
    required maxProperties minProperties dependentRequired properties patternProperties allOf
    propertyNames additionalProperties dependentSchemas anyOf oneOf not if then else
    $ref $id $anchor $defs format
    unevaluatedItems unevaluatedProperties title foo $schema additionalItems definitions nullable
    $dynamicRef
""".split()
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, float("inf"), float("nan"), 1.5, 10**30, 1e300, 1e-300, 2**64, "",
    "string", "integer", "object", "array", "^a$", "([", "*a", "\0", "^?[0-9]$", "a{99999}", "#",
    "(a{99}){99}", "#/", "#/$defs/a", "#/properties/x", "http://[bad", "\ud800", "date", "(?=a)",
    "a" * 50, 5, 100_000,
]  # fmt: skip
LETTERS = "ab^$()[]{}|*+?\\.-,01:!<=>pPuxdDwWkB\0é"


def random_schema(chooser: random.Random, depth: int = 0) -> Any:
    kind = chooser.random()
    if depth < 5 and kind < 0.4:
        count = chooser.randrange(4)
        return {chooser.choice(KEYWORDS): random_schema(chooser, depth + 1) for _ in range(count)}
    if depth < 5 and kind < 0.55:
        return [random_schema(chooser, depth + 1) for _ in range(chooser.randrange(4))]
    return chooser.choice(VALUES)


def compiles_or_is_refused(chooser: random.Random) -> None:
    schema = random_schema(chooser)
    pattern = "".join(chooser.choice(LETTERS) for _ in range(chooser.randrange(14)))
    with suppress(SchemaError):
        xgrammar.Grammar.from_ebnf(schema_grammar(schema))
    with suppress(RegexError):
        xgrammar.Grammar.from_ebnf(regex_grammar(pattern))


def test_malformed_schemas_are_refused() -> None:
    chooser = random.Random(20)
    for _ in range(2000):
        compiles_or_is_refused(chooser)


@pytest.mark.slow
def test_many_malformed_schemas_are_refused() -> None:
    chooser = random.Random()
    for _ in range(100_000):
        compiles_or_is_refused(chooser)
