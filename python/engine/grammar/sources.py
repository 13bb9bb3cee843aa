"""From a `GrammarSpec` to what xgrammar compiles, refusing what it would quietly leave out.

Pure text work. JSON Schemas and regular expressions, those inside structural tags too, become EBNF
here and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Literal

from trunkline.engine.grammar.backend import GrammarError
from trunkline.engine.grammar.schema import (
    RegexError,
    SchemaError,
    regex_grammar,
    schema_grammar,
)
from trunkline.engine.messages import GrammarSpec

MAX_TAG_DEPTH: Final = 32


class _Holds(Enum):
    """What a key of a format holds."""

    TEXT = auto()
    TEXTS = auto()
    FORMAT = auto()
    FORMATS = auto()
    TOKEN = auto()  # a special token's name or an id
    TOKENS = auto()
    TEXT_OR_TOKEN = auto()  # a text, or a format of the type `token`
    OTHER = auto()  # the library checks it


# Formats of a structural tag, and the keys that each may have.
_FORMAT_KEYS: Final[Mapping[str, Mapping[str, _Holds]]] = {
    "const_string": {"value": _Holds.TEXT},
    "json_schema": {"json_schema": _Holds.OTHER},
    "any_text": {"excludes": _Holds.TEXTS, "max_tokens": _Holds.OTHER, "max_chars": _Holds.OTHER},
    "token": {"token": _Holds.TOKEN},
    "exclude_token": {"exclude_tokens": _Holds.TOKENS},
    "any_tokens": {"exclude_tokens": _Holds.TOKENS, "max_tokens": _Holds.OTHER},
    "grammar": {"grammar": _Holds.TEXT},
    "regex": {"pattern": _Holds.TEXT},
    "sequence": {"elements": _Holds.FORMATS},
    "or": {"elements": _Holds.FORMATS},
    "tag": {"begin": _Holds.TEXT_OR_TOKEN, "content": _Holds.FORMAT, "end": _Holds.TEXT_OR_TOKEN},
    "triggered_tags": {
        "triggers": _Holds.TEXTS,
        "tags": _Holds.FORMATS,
        "at_least_one": _Holds.OTHER,
        "stop_after_first": _Holds.OTHER,
        "excludes": _Holds.TEXTS,
    },
    "token_triggered_tags": {
        "trigger_tokens": _Holds.TOKENS,
        "tags": _Holds.FORMATS,
        "exclude_tokens": _Holds.TOKENS,
        "at_least_one": _Holds.OTHER,
        "stop_after_first": _Holds.OTHER,
    },
    "tags_with_separator": {
        "tags": _Holds.FORMATS,
        "separator": _Holds.TEXT,
        "at_least_one": _Holds.OTHER,
        "stop_after_first": _Holds.OTHER,
    },
    "optional": {"content": _Holds.FORMAT},
    "plus": {"content": _Holds.FORMAT},
    "star": {"content": _Holds.FORMAT},
    "repeat": {"min": _Holds.OTHER, "max": _Holds.OTHER, "content": _Holds.FORMAT},
}


@dataclass(frozen=True, slots=True)
class Source:
    """What is compiled."""

    kind: Literal["ebnf", "structural_tag"]
    text: str


def grammar_source(spec: GrammarSpec, special_ids: Mapping[str, int]) -> Source:
    """What to compile for a grammar.

    Args:
        spec: the grammar.
        special_ids: ids of special tokens, which structural tags may name.

    Raises:
        GrammarError: it is malformed, or says what would not be enforced.
    """
    if "\0" in spec.text:
        raise GrammarError("it holds a NUL character.")
    if spec.kind == "regex":
        return Source("ebnf", regex_ebnf(spec.text))
    if spec.kind == "ebnf":
        return Source("ebnf", spec.text)
    if spec.kind == "json_object":
        return Source("ebnf", schema_ebnf({"type": "object"}))
    document = parse_json(spec.text)
    if spec.kind == "json_schema":
        return Source("ebnf", schema_ebnf(document))
    return Source("structural_tag", json.dumps(structural_tag(document, special_ids)))


def parse_json(text: str) -> Any:
    """Decode a JSON document.

    Raises:
        GrammarError: it is none, or nested too deeply, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GrammarError(f"it is not valid JSON: {words}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise GrammarError("an object in it has the same key twice.")
    return found


def _no_constant(name: str) -> Any:
    raise GrammarError(f"it is not valid JSON: {name}.")


def schema_ebnf(schema: Any) -> str:
    """EBNF for the JSON documents that a schema allows.

    Objects that list properties have no others unless the schema speaks of them: that is what its
    author wants to see, and a model that may go on for ever does.

    Raises:
        GrammarError: the schema is malformed, or has a keyword that cannot be enforced.
    """
    try:
        return schema_grammar(schema, closed=True)
    except (SchemaError, RecursionError) as error:
        words = "it is nested too deeply." if isinstance(error, RecursionError) else str(error)
        raise GrammarError(words) from error


def regex_ebnf(pattern: str) -> str:
    """EBNF for the texts that a regular expression matches as a whole.

    Raises:
        GrammarError: the expression is malformed, or not supported.
    """
    try:
        return regex_grammar(pattern)
    except (RegexError, RecursionError) as error:
        words = "it is nested too deeply." if isinstance(error, RecursionError) else str(error)
        raise GrammarError(words) from error


def structural_tag(document: Any, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """Check a structural tag, of either form, and turn its JSON Schemas into EBNF.

    Raises:
        GrammarError: it is malformed; the message has the path.
    """
    if not isinstance(document, dict):
        raise GrammarError("it must be a JSON object.")
    if "structures" in document:
        document = {"type": "structural_tag", "format": _legacy(document)}
    _check_keys(document, {"type", "format"}, "$")
    if document.get("type", "structural_tag") != "structural_tag":
        raise GrammarError('its type must be "structural_tag".')
    if "format" not in document:
        raise GrammarError("it needs a format, or structures and triggers.")
    found = _Tags(special_ids).format(document["format"], "$.format", 0)
    return {"type": "structural_tag", "format": found}


def _legacy(document: dict[str, Any]) -> dict[str, Any]:
    """The older form: structures with a begin, a schema and an end, and their triggers."""
    _check_keys(document, {"type", "structures", "triggers"}, "$")
    structures = document["structures"]
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structures must be a list of at least one.")
    tags = []
    for index, one in enumerate(structures):
        path = f"$.structures[{index}]"
        if not isinstance(one, dict):
            raise GrammarError(f"{path} must be an object.")
        _check_keys(one, {"begin", "schema", "end"}, path)
        schema = one.get("schema")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tag = {"begin": one.get("begin"), "content": content, "end": one.get("end")}
        tags.append({"type": "tag", **tag})
    return {"type": "triggered_tags", "triggers": document.get("triggers"), "tags": tags}


def _check_keys(value: dict[str, Any], known: set[str], path: str) -> None:
    unknown = sorted(value.keys() - known)
    if unknown:
        raise GrammarError(f"{path} has an unknown key {unknown[0]!r}.")


@dataclass(frozen=True, slots=True)
class _Tags:
    """Rebuilds the formats of a structural tag."""

    special_ids: Mapping[str, int]

    def format(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        if depth > MAX_TAG_DEPTH:
            raise GrammarError(f"{path} is nested more than {MAX_TAG_DEPTH} deep.")
        if not isinstance(value, dict):
            raise GrammarError(f"{path} must be an object.")
        # The lists of tags leave the type out.
        kind = value.get("type", "tag" if "begin" in value else None)
        keys = _FORMAT_KEYS.get(kind) if isinstance(kind, str) else None
        if keys is None:
            raise GrammarError(f"{path}.type is {kind!r}; known are {', '.join(_FORMAT_KEYS)}.")
        if kind == "json_schema":
            return self._schema(value, path)
        _check_keys(value, {"type", *keys}, path)
        if kind == "regex":
            return self._regex(value, path)
        found = {"type": kind}
        for key, holds in keys.items():
            if key in value:
                found[key] = self._value(value[key], holds, f"{path}.{key}", depth)
        return found

    def _schema(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _check_keys(value, {"type", "json_schema", "style"}, path)
        if value.get("style", "json") != "json":
            raise GrammarError(f'{path}.style may only be "json".')
        if "json_schema" not in value:
            raise GrammarError(f"{path} needs a json_schema.")
        return {"type": "grammar", "grammar": schema_ebnf(value["json_schema"])}

    def _regex(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        pattern = value.get("pattern")
        if not isinstance(pattern, str) or "\0" in pattern:
            raise GrammarError(f"{path}.pattern must be a string without NUL characters.")
        return {"type": "grammar", "grammar": regex_ebnf(pattern)}

    def _value(self, value: Any, holds: _Holds, path: str, depth: int) -> Any:
        if holds == _Holds.FORMAT:
            return self.format(value, path, depth + 1)
        if holds == _Holds.TEXT_OR_TOKEN and isinstance(value, dict):
            return self.format(value, path, depth + 1)
        if holds in (_Holds.TOKEN, _Holds.TOKENS, _Holds.TEXTS, _Holds.FORMATS):
            return self._list_or_token(value, holds, path, depth)
        if "\0" in str(value):
            raise GrammarError(f"{path} holds a NUL character.")
        return value

    def _list_or_token(self, value: Any, holds: _Holds, path: str, depth: int) -> Any:
        if holds == _Holds.TOKEN:
            return self.special_ids.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, list):
            raise GrammarError(f"{path} must be a list.")
        inner = {
            _Holds.TOKENS: _Holds.TOKEN,
            _Holds.TEXTS: _Holds.TEXT,
            _Holds.FORMATS: _Holds.FORMAT,
        }[holds]
        return [
            self._value(one, inner, f"{path}[{index}]", depth) for index, one in enumerate(value)
        ]
