"""The body of POST /v1/responses: its fields, and what the response repeats of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from trunkline.engine.messages import LogprobRequest
from trunkline.engine.validation import ParsedSampling, RequestError, is_int, shown
from trunkline.server.openai.fields import CommonFields

MAX_TOP_LOGPROBS: Final = 20
_LOGPROBS: Final = "message.output_text.logprobs"
# Parts of items that this server never makes, so that there is nothing to leave out.
INCLUDABLE: Final = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
MAX_METADATA: Final = (16, 64, 512)  # pairs, characters of a key and of a value
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "max_tokens": (),
    "response_format": (),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "background_options": ({},),
}


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much to think; the model's template decides what it makes of the effort."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """What the text must look like."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseFields(CommonFields, kw_only=True):
    """The body of a response."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Any = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: Any = None
    metadata: dict[str, Any] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    max_thinking_tokens: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def check_fields(fields: ResponseFields) -> None:
    """Check what depends on more than a field's type.

    Raises:
        RequestError: a value is out of range, or two fields exclude each other.
    """
    if fields.truncation not in (None, "auto", "disabled"):
        raise RequestError(
            f'truncation must be "auto" or "disabled", got {shown(fields.truncation)}.',
            "truncation",
        )
    for value in fields.include or []:
        if value not in INCLUDABLE:
            raise RequestError(
                f"include must hold names of {', '.join(INCLUDABLE)}, got {shown(value)}.",
                "include",
            )
    if fields.stream_options is not None:
        if not fields.stream:
            raise RequestError("stream_options needs stream to be true.", "stream_options")
        if fields.stream_options.continuous_usage_stats:
            raise RequestError(
                "stream_options.continuous_usage_stats is not supported here: the last event has "
                "the usage.",
                "stream_options.continuous_usage_stats",
            )
    _check_metadata(fields.metadata or {})


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    pairs, key_chars, value_chars = MAX_METADATA
    if len(metadata) > pairs:
        raise RequestError(
            f"metadata must have at most {pairs} pairs, got {len(metadata)}.", "metadata"
        )
    for key, value in metadata.items():
        if len(key) > key_chars:
            raise RequestError(
                f"metadata keys must have at most {key_chars} characters, got {len(key)}.",
                "metadata",
            )
        if not isinstance(value, str) or len(value) > value_chars:
            raise RequestError(
                f"metadata values must be strings of at most {value_chars} characters, got "
                f"{shown(value)} for {shown(key)}.",
                "metadata",
            )


def wanted_logprobs(fields: ResponseFields, *, processed: bool) -> LogprobRequest | None:
    """The log-probs that `include` or `top_logprobs` ask for; `processed` as in `LogprobRequest`.

    Raises:
        RequestError: `top_logprobs` is out of range.
    """
    top = fields.top_logprobs
    if top is not None and (not is_int(top) or not 0 <= top <= MAX_TOP_LOGPROBS):
        raise RequestError(
            f"top_logprobs must be an integer in [0, {MAX_TOP_LOGPROBS}], got {shown(top)}.",
            "top_logprobs",
        )
    if not top and _LOGPROBS not in (fields.include or []):
        return None
    return LogprobRequest(top_n=top or 0, processed=processed)


def template_variables(fields: ResponseFields) -> list[tuple[str, str, Any]]:
    """What the chat template sees of a body besides its messages, as `unread_variables` takes it.

    Later ones take the place of earlier ones.
    """
    given = fields.chat_template_kwargs or {}
    variables = [(f"chat_template_kwargs.{name}", name, value) for name, value in given.items()]
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        variables.append(("reasoning.effort", "reasoning_effort", fields.reasoning.effort))
    return variables


def echoed_fields(
    fields: ResponseFields, model: str, sampling: ParsedSampling, is_stored: bool
) -> dict[str, Any]:
    """What the response object repeats, defaults filled in, under its public names."""
    reasoning = fields.reasoning or ReasoningOptions()
    text = fields.text or TextOptions()
    values = sampling.sampling
    return {
        "model": model,
        "background": bool(fields.background),
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": values.temperature,
        "top_p": values.top_p,
        "frequency_penalty": values.frequency_penalty,
        "presence_penalty": values.presence_penalty,
        "text": {
            "format": text.format or {"type": "text"},
            "verbosity": text.verbosity or "medium",
        },
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }
