"""The request bodies of the endpoints that take one."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from trunkline.engine import native_request
from trunkline.server.anthropic import fields as anthropic_fields
from trunkline.server.batches.batch_routes import BatchFields
from trunkline.server.openai import chat, completions, responses_fields
from trunkline.server.openai import fields as openai_fields
from trunkline.server.openapi.batch_fields import batch_fields, file_fields
from trunkline.server.openapi.fields import native_fields, request_fields
from trunkline.server.openapi.response_fields import message_fields, response_fields
from trunkline.server.parsing import CallsText, ReasoningText
from trunkline.server.route import FORM, Takes
from trunkline.server.tokens import Detokenize, Tokenize


class GenerateFields(msgspec.Struct):
    """The body of /generate: exactly one of `text` and `input_ids`; a list of them is a batch."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    rid: Any = None
    stream: Any = None
    return_logprob: Any = None
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_text_in_logprobs: Any = None
    return_prompt_token_ids: Any = None
    priority: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
    extra_key: Any = None
    cache_salt: Any = None


class AbortFields(msgspec.Struct):
    """Which request ends: the one with this id, or all."""

    rid: str | None = None
    abort_all: bool | None = None


class FileForm(msgspec.Struct):
    """The form of an upload."""

    file: Any
    purpose: Any = None
    anchor: Any = msgspec.field(default=None, name="expires_after[anchor]")
    seconds: Any = msgspec.field(default=None, name="expires_after[seconds]")


class MessageTokenFields(anthropic_fields.MessageFields, kw_only=True):
    """The body of a message whose tokens are counted: as that of a message."""


_MESSAGES: Final = [{"role": "user", "content": "What is the capital of France?"}]

GENERATE: Final = Takes(
    kind=GenerateFields,
    fields=native_fields,
    unsupported=native_request.UNSUPPORTED,
    bookkeeping=native_request.BOOKKEEPING,
    one_of=("text", "input_ids"),
    example={"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8}},
)
CHAT: Final = Takes(
    kind=chat.ChatFields,
    fields=request_fields,
    unsupported={**openai_fields.UNSUPPORTED, **chat.UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING,
    example={"messages": _MESSAGES, "max_tokens": 32},
)
COMPLETION: Final = Takes(
    kind=completions.CompletionFields,
    fields=request_fields,
    unsupported={**openai_fields.UNSUPPORTED, **completions.UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING,
    example={"prompt": "The capital of France is", "max_tokens": 8},
)
RESPONSE: Final = Takes(
    kind=responses_fields.ResponseFields,
    fields=response_fields,
    unsupported={**openai_fields.UNSUPPORTED, **responses_fields.UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING - set(responses_fields.ResponseFields.__struct_fields__),
    example={"input": "What is the capital of France?", "max_output_tokens": 32},
)
MESSAGE: Final = Takes(
    kind=anthropic_fields.MessageFields,
    fields=message_fields,
    unsupported={**openai_fields.UNSUPPORTED, **anthropic_fields.UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING,
    required=("max_tokens",),
    example={"messages": _MESSAGES, "max_tokens": 32},
)
MESSAGE_TOKENS: Final = Takes(
    kind=MessageTokenFields,
    fields=message_fields,
    unsupported={**openai_fields.UNSUPPORTED, **anthropic_fields.UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING,
    example={"messages": _MESSAGES},
)
FILE: Final = Takes(kind=FileForm, fields=file_fields, media_type=FORM)
BATCH: Final = Takes(
    kind=BatchFields,
    fields=batch_fields,
    example={
        "input_file_id": "file-...",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
)
TOKENIZE: Final = Takes(
    kind=Tokenize,
    fields=request_fields,
    one_of=("prompt", "messages"),
    example={"prompt": "Hello"},
)
DETOKENIZE: Final = Takes(kind=Detokenize, fields=request_fields, example={"tokens": [1, 2]})
PARSE_CALLS: Final = Takes(
    kind=CallsText,
    fields=request_fields,
    example={
        "text": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_call_parser": "hermes",
    },
)
SEPARATE_REASONING: Final = Takes(
    kind=ReasoningText,
    example={"text": "<think>Hm.</think>Yes.", "reasoning_parser": "think"},
)
ABORT: Final = Takes(kind=AbortFields, example={"rid": "my-request"})
