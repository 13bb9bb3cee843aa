"""The fields that chat completions and completions share, and in which class each one is.

Supported fields are honoured; bookkeeping fields are accepted and have no effect; known fields that
are not supported are accepted only when null or neutral; all others are ignored and named as such.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from trunkline.engine.body_fields import SchedulingFields
from trunkline.engine.messages import LogprobRequest
from trunkline.engine.native_request import (
    RequestContext,
    RequestOptions,
    parse_namespace,
    parse_priority,
    parse_rid,
)
from trunkline.engine.ranks import FIELDS as RANK_FIELDS
from trunkline.engine.ranks import parse_rank
from trunkline.engine.typed_bodies import convert
from trunkline.engine.validation import (
    Limits,
    ParsedSampling,
    RequestError,
    is_int,
    parse_sampling_params,
    refuse_unsupported,
    shown,
)
from trunkline.server.openai.response_format import parse_response_format
from trunkline.server.openai.rows import TokenIds

if TYPE_CHECKING:
    from trunkline.server.state import Server

Body = TypeVar("Body", bound="SchedulingFields")

BOOKKEEPING: Final = frozenset(
    (
        "user store metadata service_tier prompt_cache_key prompt_cache_retention "
        "prompt_cache_options "
        "safety_identifier verbosity client_metadata include session_id"
    ).split()
)
# Native name -> the name that clients of this API use.
NAMES: Final = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING: Final = (
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
    "stop stop_token_ids logit_bias ignore_eos skip_special_tokens no_stop_trim n "
    "stop_regex json_schema regex ebnf structural_tag custom_params"
).split()
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "lora_path": (),
    "session_params": ({},),
    "custom_logit_processor": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_spec_tokens_details": (False,),
    "return_meta_info": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "beam_width": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "watermark": ({}, False),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "kv_transfer_params": ({},),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}

# Other servers' fields -> what to use here.
INSTEAD: Final = {
    "structured_outputs": "response_format, regex or ebnf",
    "guided_json": "response_format",
    "guided_regex": "regex",
    "guided_choice": "regex",
    "guided_grammar": "ebnf",
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # pads OpenAI's own streams; there is none here


class CommonFields(SchedulingFields, kw_only=True):
    """Fields of every endpoint that generates; `parse_sampling_params` checks those of sampling."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Any = None
    min_tokens: Any = None
    max_tokens: Any = None
    stream_interval: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    logit_bias: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    no_stop_trim: Any = None
    include_stop_str_in_output: Any = None
    n: Any = None
    best_of: Any = None
    stop_regex: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    json_schema: Any = None
    response_format: Any = None
    custom_params: Any = None


class ChoiceFields(CommonFields, kw_only=True):
    """Fields of chat completions and completions, whose answers are choices."""

    max_completion_tokens: Any = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    service_tier: str | None = None

    def longest(self) -> tuple[str, Any]:
        """The name by which the body limits the answer's length, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def parse_fields(
    body: Any, kind: type[Body], unsupported: Mapping[str, tuple[object, ...]]
) -> tuple[Body, list[str]]:
    """Check the types of a body.

    Returns:
        The typed body, and the names of fields that nothing here knows or that have no effect in
        this body.

    Raises:
        RequestError: a field has the wrong type, or is not supported.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(body)}.")
    refuse_unsupported(body, UNSUPPORTED, INSTEAD)
    refuse_unsupported(body, unsupported)
    typed = convert(body, kind)
    known = {*kind.__struct_fields__, *BOOKKEEPING, *UNSUPPORTED, *unsupported}
    ignored = [name for name in body if name not in known]
    for name in kind.__struct_fields__:
        part = getattr(typed, name)
        if isinstance(part, msgspec.Struct):
            unknown = (key for key in body[name] if key not in part.__struct_fields__)
            ignored += [f"{name}.{key}" for key in unknown]
    if isinstance(typed, CommonFields):
        ignored += _without_effect(typed)
    return typed, ignored


def _without_effect(fields: CommonFields) -> list[str]:
    """Names of what the rest of the body leaves without effect."""
    names = []
    if fields.stream_interval is not None and not fields.stream:
        names.append("stream_interval")
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        names.append("stream_options.include_obfuscation")
    if isinstance(fields, ChoiceFields) and fields.max_tokens is not None:
        if fields.longest()[1] != fields.max_tokens:
            names.append("max_tokens")
    return names


def parse_sampling(
    fields: CommonFields,
    context: RequestContext,
    max_new_tokens: tuple[str, Any],
    fallback: int | None = None,
) -> ParsedSampling:
    """Validate the sampling fields of a body.

    Args:
        fields: the typed body.
        context: limits and defaults.
        max_new_tokens: the client's name for it, and its value; None leaves it to the defaults.
        fallback: what it is if the defaults do not say; None: as many as the context holds.

    Raises:
        RequestError: a value is out of range, unknown or not supported.
    """
    longest_name, longest = max_new_tokens
    raw = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    raw |= {
        native: value
        for native, value in (
            ("sampling_seed", fields.seed),
            ("min_new_tokens", fields.min_tokens),
            ("stream_interval", fields.stream_interval),
        )
        if value is not None
    }
    if fields.include_stop_str_in_output is not None:
        if fields.no_stop_trim not in (None, fields.include_stop_str_in_output):
            raise RequestError(
                "no_stop_trim and include_stop_str_in_output are two names for one thing, and "
                "contradict each other.",
                "include_stop_str_in_output",
            )
        raw["no_stop_trim"] = fields.include_stop_str_in_output
    default = context.defaults.get("max_new_tokens", fallback)
    raw["max_new_tokens"] = default if longest is None else longest
    parsed = parse_sampling_params(
        raw,
        limits=context.limits,
        defaults=context.defaults,
        names={**NAMES, "max_new_tokens": longest_name},
    )
    best_of = fields.best_of
    if best_of is not None and (not is_int(best_of) or best_of != parsed.n):
        raise RequestError(
            f"best_of must be equal to n ({parsed.n}), got {shown(best_of)}: all samples are "
            "returned, none is chosen.",
            "best_of",
        )
    return _with_format(parsed, fields.response_format, context.limits)


def _with_format(parsed: ParsedSampling, response_format: Any, limits: Limits) -> ParsedSampling:
    grammar = parse_response_format(response_format, limits.max_grammar_chars)
    if grammar is None:
        return parsed
    if parsed.grammar is not None:
        raise RequestError(
            f"response_format and {parsed.grammar.kind} cannot both say what the output must be.",
            "response_format",
        )
    return replace(parsed, grammar=grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The model's name to echo, the id of a body, and the options of its engine requests."""

    model: str
    rid: str
    options: RequestOptions


def parse_envelope(
    fields: SchedulingFields,
    server: Server,
    rid: str,
    *,
    stream: bool = False,
    logprobs: LogprobRequest | None = None,
) -> Envelope:
    """Check what a body says besides what is to be computed.

    Args:
        fields: the typed body.
        server: what it is asked of.
        rid: the id of a body that has none.
        stream: the answer is streamed.
        logprobs: that are wanted.

    Raises:
        RequestError: a value is malformed, or asks for what the server does not have.
    """
    context = server.openai
    given = {name: getattr(fields, name) for name in RANK_FIELDS}
    return Envelope(
        model=server.check_model(fields.model),
        rid=rid if fields.rid is None else parse_rid(fields.rid, context.limits),
        options=RequestOptions(
            stream=stream,
            priority=parse_priority(fields.priority, context),
            namespace=parse_namespace(fields.extra_key, fields.cache_salt, context.limits),
            dp_rank=parse_rank(given, context.dp_size),
            logprobs=logprobs,
            received_ts=time.time(),
        ),
    )


def wanted_ids(fields: ChoiceFields) -> TokenIds:
    """The token ids that a body asks for."""
    output = bool(fields.return_token_ids)
    return TokenIds(prompt=output or bool(fields.return_prompt_token_ids), output=output)


def service_tier(fields: ChoiceFields) -> dict[str, object]:
    """What a response says of the tier, if its request did: there is one."""
    return {} if fields.service_tier is None else {"service_tier": "default"}


def wants_usage(fields: CommonFields, default: bool) -> tuple[bool, bool]:
    """Whether a stream ends with a usage chunk, and whether every chunk has its usage.

    Raises:
        RequestError: stream options without a stream.
    """
    options = fields.stream_options
    if options is None:
        return default, False
    if not fields.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    include = default if options.include_usage is None else options.include_usage
    return include, bool(options.continuous_usage_stats)
