"""The one place where a JSON Schema becomes EBNF."""

from __future__ import annotations

import json
from typing import Any

import xgrammar

from trunkline.engine.grammar.backend import GrammarError


def schema_ebnf(schema: Any) -> str:
    """EBNF for the JSON documents that a schema allows.

    Raises:
        GrammarError: the schema is malformed or not supported.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON Schema must be an object, true or false.")
    try:
        grammar = xgrammar.Grammar.from_json_schema(
            json.dumps(schema), strict_mode=False, max_whitespace_cnt=2
        )
    except RuntimeError as error:
        raise GrammarError(str(error)) from error
    return str(grammar)
