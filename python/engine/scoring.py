"""Scores: how likely given tokens are to come next, after a query with each of several items.

Also reranking with decoders that were trained to judge documents: their chat template puts a query
and a document into a question, and the score is how much likelier its "yes" is than its "no".
Knows nothing of HTTP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypedDict, TypeVar

import msgspec

from trunkline.engine.body_fields import SchedulingFields
from trunkline.engine.client import Request, Sample, Stream
from trunkline.engine.embeddings import check_size
from trunkline.engine.messages import LogprobRequest, SamplingParams
from trunkline.engine.native_request import RequestContext, RequestOptions, tokenise
from trunkline.engine.outputs import OutputOptions, prompt_meta_info, unanswered
from trunkline.engine.prompts import check_length, check_prompt, row_ids
from trunkline.engine.typed_bodies import convert
from trunkline.engine.validation import RequestError, parse_token_ids, shown

_MAX_TEMPERATURE: Final = 1e6
Fields = TypeVar("Fields", bound=msgspec.Struct)

_MIN_TEMPERATURE: Final = 1e-6
# What the model answers with, and the variable by which its template shows that it was trained to.
_ANSWERS: Final = ("yes", "no")
_VARIABLE: Final = "instruct"


class Template(Protocol):
    """What is needed of a chat template here."""

    def reads(self, variable: str) -> bool:
        """Whether the template depends on a variable."""

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a chat."""


class ScoreFields(SchedulingFields, kw_only=True):
    """A query, the items beside it, and the tokens whose chances are wanted."""

    query: Any = None
    items: Any = None
    label_token_ids: Any = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    temperature: float | None = None


class RerankFields(SchedulingFields, kw_only=True):
    """A query, and the documents to put in order."""

    query: str
    documents: list[str]
    instruct: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreWishes(TypedDict, total=False):
    """Optional fields of `ScoreFields`.

    `apply_softmax` makes the chances of the labels add up to 1; `item_first` puts the item before
    the query; `temperature` (1) divides the logits.
    """

    apply_softmax: bool | None
    item_first: bool | None
    temperature: float | None


class RerankWishes(TypedDict, total=False):
    """Optional fields of `RerankFields`.

    `instruct` tells the model what makes a document fit, `top_n` is how many are returned, without
    their texts if `return_documents` is False.
    """

    instruct: str | None
    top_n: int | None
    return_documents: bool | None


def score_fields(**fields: Any) -> ScoreFields:
    """The fields of a caller in Python.

    Raises:
        TypeError: there is no such field.
        RequestError: one has the wrong type.
    """
    return _typed(ScoreFields(**fields))


def rerank_fields(**fields: Any) -> RerankFields:
    """As `score_fields`."""
    return _typed(RerankFields(**fields))


def _typed(fields: Fields) -> Fields:
    return convert(msgspec.structs.asdict(fields), type(fields))


@dataclass(frozen=True, slots=True)
class Labels:
    """Token ids whose chances are wanted, at a temperature; normalised among them or not."""

    token_ids: list[int]
    softmax: bool = False
    temperature: float = 1.0


def score_requests(
    fields: ScoreFields, context: RequestContext, rid: str, options: RequestOptions
) -> tuple[list[Request], Labels]:
    """One engine request per item.

    Raises:
        RequestError: a field is wrong; the message names it.
    """
    limits = context.limits
    ids = parse_token_ids(fields.label_token_ids, "label_token_ids", limits, limits.max_scored_ids)
    if not ids:
        raise RequestError(
            "label_token_ids is empty: at least one id is needed.", "label_token_ids"
        )
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if not _MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE:
        raise RequestError(
            f"temperature must be in [{_MIN_TEMPERATURE}, {_MAX_TEMPERATURE:.0f}], got "
            f"{shown(temperature)}.",
            "temperature",
        )
    labels = Labels(ids, bool(fields.apply_softmax), temperature)
    prompts = _score_prompts(fields, context)
    return _requests(prompts, labels, rid, options), labels


def _score_prompts(fields: ScoreFields, context: RequestContext) -> list[list[int]]:
    query, items = fields.query, fields.items
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, list) or not 1 <= len(items) <= context.limits.max_prompts:
        raise RequestError(
            f"items must be a string, or a list of 1 to {context.limits.max_prompts} strings or "
            f"lists of token ids, got {shown(items)}.",
            "items",
        )
    names = [f"items[{row}]" for row in range(len(items))]
    if isinstance(query, str):
        for name, item in zip(names, items, strict=True):
            if not isinstance(item, str):
                raise RequestError(
                    f"{name} must be a string, as the query is, got {shown(item)}.", name
                )
        texts = [item + query if fields.item_first else query + item for item in items]
        prompts = tokenise(texts, names, context)
    else:
        parse_token_ids(query, "query", context.limits, most=2**31)
        for name, item in zip(names, items, strict=True):
            parse_token_ids(item, name, context.limits, most=2**31)
        prompts = [item + query if fields.item_first else query + item for item in items]
    for name, prompt in zip(names, prompts, strict=True):
        check_prompt(prompt, name, context.limits)
    check_size(prompts, "items", context.limits)
    return prompts


def _requests(
    prompts: Sequence[list[int]], labels: Labels, rid: str, options: RequestOptions
) -> list[Request]:
    """Requests for one token each, which is not looked at: only what it could have been."""
    sampling = SamplingParams(
        temperature=labels.temperature, max_new_tokens=1, ignore_eos=True, seed=0
    )
    # The model's own log-probs are those at temperature 1.
    wanted = LogprobRequest(ids=labels.token_ids, processed=labels.temperature != 1)
    return [
        Request(
            rid=row_id,
            prompt_ids=prompt,
            sampling=sampling,
            stream_interval=0,
            priority=options.priority,
            namespace=options.namespace,
            dp_rank=options.dp_rank,
            logprobs=wanted,
            received_ts=options.received_ts,
        )
        for row_id, prompt in zip(row_ids(rid, len(prompts)), prompts, strict=True)
    ]


def scores(sample: Sample, labels: Labels) -> list[float]:
    """The chance of every label, in their order.

    With `softmax` they add up to 1, else each is that of the token among the whole vocabulary.

    Raises:
        RequestError: the request failed or was aborted.
    """
    if sample.output_logprobs is None or not sample.output_logprobs.ids:
        raise unanswered(sample)
    values = [logprob for logprob, _ in sample.output_logprobs.ids[0]]
    if not labels.softmax:
        return [math.exp(value) for value in values]
    best = max(values)
    weights = [math.exp(value - best) for value in values]
    return [weight / sum(weights) for weight in weights]


def rerank_requests(
    fields: RerankFields,
    context: RequestContext,
    template: Template,
    rid: str,
    options: RequestOptions,
) -> tuple[list[Request], Labels]:
    """One engine request per document; the first of its scores is the document's.

    Raises:
        RequestError: the model is no reranker, or a field is wrong.
    """
    limits = context.limits
    encoded = context.tokenizer.encode_batch(_ANSWERS, add_special_tokens=False)
    if not template.reads(_VARIABLE) or any(len(ids) != 1 for ids in encoded):
        raise RequestError(
            "this model is no reranker: its chat template does not put a query and a document "
            f"(and the variable {_VARIABLE!r}) into a question that a single token answers with "
            "yes or no. Use /v1/score with label_token_ids, or compare embeddings.",
        )
    count = len(fields.documents)
    if not 1 <= count <= limits.max_prompts:
        raise RequestError(
            f"documents must have 1 to {limits.max_prompts} entries, got {count}.", "documents"
        )
    if fields.top_n is not None and fields.top_n < 1:
        raise RequestError(f"top_n must be at least 1, got {shown(fields.top_n)}.", "top_n")
    variables = {} if fields.instruct is None else {_VARIABLE: fields.instruct}
    texts = []
    for row, document in enumerate(fields.documents):
        chat = [{"role": "user", "content": text} for text in (fields.query, document)]
        try:
            text = template.render(chat, add_generation_prompt=True, **variables)
        except ValueError as error:
            raise RequestError(str(error), f"documents[{row}]") from error
        check_length(text, f"documents[{row}]", context.tokenizer, limits)
        texts.append(text)
    prompts = context.tokenizer.encode_batch(texts, add_special_tokens=False)
    for row, prompt in enumerate(prompts):
        check_prompt(prompt, f"documents[{row}]", limits)
    check_size(prompts, "documents", limits)
    labels = Labels([ids[0] for ids in encoded], softmax=True)
    return _requests(prompts, labels, rid, options), labels


def rerank_output(
    fields: RerankFields, streams: Sequence[Stream], labels: Labels, weight_version: str
) -> list[dict[str, object]]:
    """The documents, the best first.

    Raises:
        RequestError: a request failed or was aborted.
    """
    now = time.time()
    options = OutputOptions(weight_version=weight_version)
    found = []
    for index, stream in enumerate(streams):
        [sample] = stream.samples
        score = scores(sample, labels)[0]
        found.append((score, index, prompt_meta_info(stream, sample, now, options)))
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    keeps = fields.return_documents is not False
    return [
        {
            "score": score,
            "document": fields.documents[index] if keeps else None,
            "index": index,
            "meta_info": meta,
        }
        for score, index, meta in found[: fields.top_n]
    ]
