"""The fields that chat completions and completions share, and in which class each one is.

Supported fields are honoured; bookkeeping fields are accepted and have no effect; known fields that
are not supported are accepted only when null or neutral; all others are ignored and named as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from trunkline.engine.native_request import RequestContext, parse_namespace, parse_priority
from trunkline.engine.validation import (
    ParsedSampling,
    RequestError,
    parse_sampling_params,
    refuse_unsupported,
    shown,
)

Body = TypeVar("Body", bound="CommonFields")

BOOKKEEPING: Final = frozenset(
    (
        "user store metadata service_tier prompt_cache_key prompt_cache_retention "
        "safety_identifier verbosity client_metadata include session_id"
    ).split()
)
# Native name -> the name that clients of this API use.
NAMES: Final = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING: Final = (
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
    "stop stop_token_ids logit_bias ignore_eos skip_special_tokens no_stop_trim n "
    "stop_regex regex ebnf structural_tag custom_params"
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
    "return_prompt_token_ids": (False,),
    "return_token_ids": (False,),
    "return_meta_info": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "data_parallel_rank": (0,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # pads OpenAI's own streams; there is none here


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of both endpoints; sampling fields are checked by `parse_sampling_params`."""

    model: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Any = None
    priority: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None
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
    n: Any = None
    stop_regex: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None


def parse_fields(
    body: Any, kind: type[Body], unsupported: Mapping[str, tuple[object, ...]]
) -> tuple[Body, list[str]]:
    """Check the types of a body.

    Returns:
        The typed body, and the names of fields that nothing here knows.

    Raises:
        RequestError: a field has the wrong type, or is not supported.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(body)}.")
    refuse_unsupported(body, UNSUPPORTED)
    refuse_unsupported(body, unsupported)
    try:
        typed = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`") or None
        if field is None and "missing required field" in words:
            field = words.rpartition("field ")[2].strip("`")
        raise RequestError(f"{field}: {words}." if path else f"{words}.", field) from error
    known = {*kind.__struct_fields__, *BOOKKEEPING, *UNSUPPORTED, *unsupported}
    return typed, [name for name in body if name not in known]


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
    default = context.defaults.get("max_new_tokens", fallback)
    raw["max_new_tokens"] = default if longest is None else longest
    return parse_sampling_params(
        raw,
        limits=context.limits,
        defaults=context.defaults,
        names={**NAMES, "max_new_tokens": longest_name},
    )


def parse_scheduling(fields: CommonFields, context: RequestContext) -> tuple[int, str]:
    """Priority and cache namespace of a body."""
    priority = parse_priority(fields.priority, context)
    return priority, parse_namespace(fields.extra_key, fields.cache_salt, context.limits)


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
