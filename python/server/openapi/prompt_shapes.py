"""What /encode, /v1/embeddings, /v1/score and /v1/rerank take and give; a test compares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired, TypedDict

import msgspec

from trunkline.engine import embeddings as encoding
from trunkline.engine import native_request
from trunkline.engine.scoring import RerankFields, ScoreFields
from trunkline.engine.validation import Limits
from trunkline.server.openai import embeddings, scoring
from trunkline.server.openai import fields as openai_fields
from trunkline.server.openapi.fields import native_fields, request_fields, token_ids
from trunkline.server.openapi.shapes import CachedTokens, FinishReason
from trunkline.server.openapi.words import Schema
from trunkline.server.route import Gives, Takes


class EncodeFields(msgspec.Struct):
    """The body of /encode: exactly one of `text` and `input_ids`; a list of them is a batch."""

    text: Any = None
    input_ids: Any = None
    dimensions: Any = None
    rid: Any = None
    priority: Any = None
    extra_key: Any = None
    cache_salt: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None


class PromptInfo(TypedDict):
    """Facts of a prompt that was computed; null where there is no value. Times: unix seconds."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    num_retractions: int
    e2e_latency: float | None


class Encoded(TypedDict):
    """An embedding; null if the request was aborted."""

    embedding: list[float] | None
    meta_info: PromptInfo


class PromptUsage(TypedDict):
    """Token counts of an answer that generates nothing."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Embedding(TypedDict):
    """A vector; in base64 its bytes are float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    """A vector for every input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Scoring(TypedDict):
    """For every item the chance of every label."""

    object: Literal["scoring"]
    model: str
    scores: list[list[float]]
    usage: PromptUsage


class Ranked(TypedDict):
    """A document and how well it answers the query; `index` is its place in the request."""

    score: float
    document: str | None
    index: int
    meta_info: NotRequired[PromptInfo]


def _dimensions() -> Schema:
    return {"type": "integer", "minimum": 1}  # at most what the model's states have


def encode_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of /encode by name."""
    return {**native_fields(limits), "dimensions": _dimensions()}


def prompt_fields(limits: Limits) -> Mapping[str, Schema]:
    """Fields of the others by name."""
    common = request_fields(limits)
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    texts["maxItems"] = limits.max_prompts
    id_rows = {"type": "array", "items": token_ids(), "maxItems": limits.max_prompts}
    return {
        **common,
        "input": common["prompt"],
        "dimensions": _dimensions(),
        "query": {"anyOf": [{"type": "string"}, token_ids()]},
        "items": {"anyOf": [{"type": "string"}, texts, id_rows]},
        "documents": texts,
        "label_token_ids": {**token_ids(limits.max_scored_ids), "minItems": 1},
    }


ENCODE: Final = Takes(
    kind=EncodeFields,
    fields=encode_fields,
    unsupported=encoding.UNSUPPORTED,
    bookkeeping=native_request.BOOKKEEPING,
    one_of=("text", "input_ids"),
    example={"text": "The capital of France is Paris."},
)
EMBEDDING: Final = Takes(
    kind=embeddings.EmbeddingFields,
    fields=prompt_fields,
    unsupported={**openai_fields.UNSUPPORTED, **embeddings.UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING,
    example={"input": ["The capital of France is Paris.", "Water boils at 100 degrees."]},
)
SCORE: Final = Takes(
    kind=ScoreFields,
    fields=prompt_fields,
    unsupported={**openai_fields.UNSUPPORTED, **scoring.SCORE_UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING,
    required=("query", "items", "label_token_ids"),
    example={
        "query": "Is Paris in France? Answer: ",
        "items": ["yes", "no"],
        "label_token_ids": [1, 2],
    },
)
RERANK: Final = Takes(
    kind=RerankFields,
    fields=prompt_fields,
    unsupported={**openai_fields.UNSUPPORTED, **scoring.RERANK_UNSUPPORTED},
    bookkeeping=openai_fields.BOOKKEEPING,
    example={"query": "capital of France", "documents": ["Paris", "London"]},
)
ENCODED: Final = Gives(kind=Encoded | list[Encoded])
EMBEDDINGS: Final = Gives(kind=Embeddings)
SCORING: Final = Gives(kind=Scoring)
RANKING: Final = Gives(kind=list[Ranked])
