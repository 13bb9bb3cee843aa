"""JSON schemas of request fields that are checked by code, from the limits that this code knows.

A typed struct says of such a field only that it may be anything (`Any`). The ranges come from
`engine/validation.py`; a test compares what these schemas allow with what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.engine import validation
from trunkline.engine.chat_template import ROLES
from trunkline.engine.ranks import FIELDS as RANK_FIELDS
from trunkline.engine.validation import Limits, Number
from trunkline.server.openai import fields as openai_fields
from trunkline.server.openapi.tool_fields import chat_tools
from trunkline.server.openapi.words import Schema, nullable

_INTEGER: Final[Schema] = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_RANK: Final[Schema] = {
    "type": "integer", "minimum": 0, "description": "Below --dp-size."
}  # fmt: skip
_BOOLEAN: Final[Schema] = {"type": "boolean"}
_TOP_LOGPROBS: Final = 20  # of the OpenAI endpoints


def only(neutral: tuple[object, ...]) -> Schema:
    """A field that is known and not supported: null, or a value that changes nothing."""
    return {"enum": [None, *neutral], "description": "Not supported: may only be one of these."}


def number(rule: Number) -> Schema:
    """The range of a number."""
    low = "exclusiveMinimum" if rule.is_open else "minimum"
    kind = "integer" if rule.integer else "number"
    schema: Schema = {"type": kind, low: rule.low, "maximum": rule.high}
    return schema if rule.also is None else {"anyOf": [{"const": rule.also}, schema]}


def one_or_rows(schema: Schema, most: int) -> Schema:
    """A value, or a list of such with an entry per row of a batch."""
    return {"anyOf": [schema, {"type": "array", "items": nullable(schema), "maxItems": most}]}


def token_ids(most: int | None = None) -> Schema:
    """A list of token ids."""
    schema: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return schema if most is None else {**schema, "maxItems": most}


def _strings(most: int, longest: int) -> Schema:
    one = {"type": "string", "minLength": 1, "maxLength": longest}
    return {"anyOf": [one, {"type": "array", "items": one, "maxItems": most}]}


def sampling_fields(limits: Limits) -> dict[str, Schema]:
    """Every sampling parameter by its native name."""
    bound = validation.MAX_LOGIT_BIAS
    return {
        **{name: number(rule) for name, rule in validation.NUMBERS.items()},
        **dict.fromkeys(validation.FLAGS, _BOOLEAN),
        "stop": _strings(limits.max_stop_strings, limits.max_stop_chars),
        "stop_regex": _strings(limits.max_stop_patterns, limits.max_pattern_chars),
        "stop_token_ids": token_ids(limits.max_stop_token_ids),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -bound, "maximum": bound},
            "maxProperties": limits.max_logit_bias,
        },
        **_grammars(limits),
        "sampling_seed": _INTEGER,
        "seed": _INTEGER,
        "n": {"type": "integer", "minimum": 1, "maximum": limits.max_samples},
        **{name: only(neutral) for name, neutral in validation.UNSUPPORTED.items()},
    }


def _grammars(limits: Limits) -> Mapping[str, Schema]:
    """Parameters that say what the output must be; at most one of them may be given."""
    text: Schema = {"type": "string", "maxLength": limits.max_grammar_chars}
    return {
        "json_schema": {"anyOf": [{"type": ["object", "boolean"]}, text]},
        "structural_tag": {"anyOf": [{"type": ["object", "boolean"]}, text]},
        "regex": text,
        "ebnf": text,
    }


_SCHEMA_NAMES: Final[Schema] = {
    "name": nullable({"type": "string"}),
    "description": nullable({"type": "string"}),
    "schema": {"type": ["object", "boolean"]},
    "strict": nullable(_BOOLEAN),
}


def _formats(json_schema: Schema) -> Schema:
    names = ["text", "json_object", "structural_tag"]
    others = {"type": "object", "properties": {"type": {"enum": names}}, "required": ["type"]}
    return {"anyOf": [others, json_schema]}


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _response_format() -> Schema:
    schema = _closed(_SCHEMA_NAMES, ["schema"])
    kind: Schema = {"type": {"const": "json_schema"}}
    return _formats(_closed({**kind, "json_schema": schema}, ["type", "json_schema"]))


def text_format() -> Schema:
    """The format of a text in responses and messages: a schema's fields stand beside its type."""
    kind: Schema = {"type": {"const": "json_schema"}}
    return _formats(_closed({**kind, **_SCHEMA_NAMES}, ["type", "schema"]))


def sampling_params(limits: Limits) -> Schema:
    """The object `sampling_params` of the native API."""
    fields = sampling_fields(limits)
    return {
        "type": "object",
        "properties": {name: nullable(schema) for name, schema in sorted(fields.items())},
        "additionalProperties": False,
    }


def request_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of the OpenAI endpoints and of /tokenize by name."""
    native = sampling_fields(limits)
    client_names = {openai_fields.NAMES.get(name, name): native[name] for name in native}
    rid = {"type": "string", "minLength": 1, "maxLength": limits.max_id_chars}
    tops: Schema = {"type": "integer", "minimum": 0, "maximum": _TOP_LOGPROBS}
    text_rows = {"type": "array", "items": {"type": "string"}, "maxItems": limits.max_prompts}
    id_rows = {"type": "array", "items": token_ids(), "maxItems": limits.max_prompts}
    return {
        **client_names,
        "max_tokens": native["max_new_tokens"],
        "max_completion_tokens": native["max_new_tokens"],
        "model": {"type": "string", "description": 'The served model\'s name, or "default".'},
        "rid": rid,
        "priority": _INTEGER,
        **dict.fromkeys(RANK_FIELDS, _RANK),
        "messages": messages(),
        **chat_tools(),
        "max_thinking_tokens": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "best_of": native["n"],
        "response_format": _response_format(),
        "input_ids": token_ids(),
        "documents": {"type": "array", "items": {"type": "object"}},
        "include_stop_str_in_output": _BOOLEAN,
        "top_logprobs": tops,
        "logprobs": {"anyOf": [{"const": False}, tops]},
        "prompt": {"anyOf": [{"type": "string"}, text_rows, token_ids(), id_rows]},
        "tokens": {"anyOf": [token_ids(), {"type": "array", "items": token_ids()}]},
    }


def native_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of /generate by name; a list is a batch, or has a value per row of one."""
    most = limits.max_prompts
    text_rows = {
        "type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": most
    }  # fmt: skip
    id_rows = {"type": "array", "items": token_ids(), "minItems": 1, "maxItems": most}
    tops = {"type": "integer", "minimum": 0, "maximum": limits.max_top_logprobs}
    scored = token_ids(limits.max_scored_ids)
    name = {"type": "string", "maxLength": limits.max_namespace_chars}
    return {
        "text": {"anyOf": [{"type": "string"}, text_rows]},
        "input_ids": {"anyOf": [token_ids(), id_rows]},
        "sampling_params": one_or_rows(sampling_params(limits), most),
        "rid": one_or_rows(
            {"type": "string", "minLength": 1, "maxLength": limits.max_id_chars}, most
        ),
        "stream": _BOOLEAN,
        "return_logprob": one_or_rows(_BOOLEAN, most),
        "logprob_start_len": one_or_rows({"type": "integer", "minimum": -1}, most),
        "top_logprobs_num": one_or_rows(tops, most),
        "token_ids_logprob": {"anyOf": [scored, {"type": "array", "items": nullable(scored)}]},
        "return_text_in_logprobs": _BOOLEAN,
        "return_prompt_token_ids": _BOOLEAN,
        "priority": _INTEGER,
        **dict.fromkeys(RANK_FIELDS, _RANK),
        "extra_key": one_or_rows(name, most),
        "cache_salt": one_or_rows(name, most),
    }


def messages() -> Schema:
    """The messages of a chat."""
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    content: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}

    def message(roles: list[str], content: Schema, required: list[str]) -> Schema:
        properties: Schema = {"role": {"enum": roles}, "content": content}
        return {"type": "object", "properties": properties, "required": required}

    others = [role for role in ROLES if role != "assistant"]
    kinds = [
        message(others, content, ["role", "content"]),
        message(["assistant"], nullable(content), ["role"]),
    ]
    return {"type": "array", "minItems": 1, "maxItems": 16_384, "items": {"anyOf": kinds}}
