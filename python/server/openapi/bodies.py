"""The request bodies of the endpoints that take one."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from trunkline.engine import native_request
from trunkline.server.openai import chat, completions
from trunkline.server.openai import fields as openai_fields
from trunkline.server.openapi.fields import native_fields, request_fields
from trunkline.server.route import Takes
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
    extra_key: Any = None
    cache_salt: Any = None


class AbortFields(msgspec.Struct):
    """Which request ends: the one with this id, or all."""

    rid: str | None = None
    abort_all: bool | None = None


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
TOKENIZE: Final = Takes(
    kind=Tokenize,
    fields=request_fields,
    one_of=("prompt", "messages"),
    example={"prompt": "Hello"},
)
DETOKENIZE: Final = Takes(kind=Detokenize, fields=request_fields, example={"tokens": [1, 2]})
ABORT: Final = Takes(kind=AbortFields, example={"rid": "my-request"})
