"""POST /v1/chat/completions: the response, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trunkline.engine.client import Stream, Update
from trunkline.server.openai import rows
from trunkline.server.openai.logprobs import chat_logprobs
from trunkline.server.state import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a response repeats, and what it holds besides text; `extra` are keys of its own."""

    id: str
    model: str
    created: int
    include_usage: bool
    continuous_usage: bool
    token_ids: rows.TokenIds = field(default_factory=rows.TokenIds)
    extra: Mapping[str, object] = field(default_factory=dict)


class ChatReply:
    """Rows and chunks of one chat completion."""

    def __init__(self, server: Server, options: ChatOptions) -> None:
        self._texts = server.token_texts
        self._weight_version = server.config.engine.model.weight_version
        self._options = options
        self._fingerprint = rows.fingerprint(server.client.status.facts)

    def whole(self, streams: Sequence[Stream]) -> object:
        [stream] = streams
        ids = self._options.token_ids
        choices = [
            {
                "index": sample.index,
                "message": {
                    "role": "assistant",
                    "content": sample.text,
                    "refusal": None,
                    "reasoning_content": None,
                },
                "logprobs": chat_logprobs(sample.output_ids, sample.output_logprobs, self._texts),
                **rows.finish(sample),
                **ids.of_prompt(stream),
                **ids.of_output(sample.output_ids),
            }
            for sample in stream.samples
        ]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": rows.usage(streams),
            "metadata": rows.metadata(streams, self._weight_version),
            **self._prompt_ids(stream),
        }

    def opening(self, streams: Sequence[Stream]) -> list[object]:
        delta = {"role": "assistant", "content": "", "reasoning_content": None}
        [stream] = streams
        ids = self._options.token_ids.of_prompt(stream)
        first = self._prompt_ids(stream)
        return [
            self._chunk(_choice(sample.index, delta) | ids) | first for sample in stream.samples
        ]

    def events(self, prompt: int, stream: Stream, updates: Iterable[Update]) -> list[object]:
        chunks: list[object] = []
        for update in updates:
            sample = update.sample
            ids = self._options.token_ids.of_output(update.token_ids)
            if update.text or update.logprobs is not None or (ids and update.token_ids):
                choice = _choice(sample.index, {"content": update.text}) | ids
                choice["logprobs"] = chat_logprobs(update.token_ids, update.logprobs, self._texts)
                chunks.append(self._with_usage(self._chunk(choice), stream))
            if update.finished:
                choice = _choice(sample.index, {}) | rows.finish(sample)
                choice |= self._options.token_ids.of_output([])
                chunks.append(self._with_usage(self._chunk(choice), stream))
        return chunks

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        if not self._options.include_usage:
            return []
        head = self._head("chat.completion.chunk")
        return [{**head, "choices": [], "usage": rows.usage(streams)}]

    def _prompt_ids(self, stream: Stream) -> dict[str, object]:
        """Of the whole response, where all choices have one prompt."""
        ids = self._options.token_ids
        return ids.of_prompt(stream) if ids.output else {}

    def _head(self, kind: str) -> dict[str, object]:
        options = self._options
        return {
            "id": options.id,
            "object": kind,
            "created": options.created,
            "model": options.model,
            "system_fingerprint": self._fingerprint,
            **options.extra,
        }

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _with_usage(self, chunk: dict[str, object], stream: Stream) -> dict[str, object]:
        if self._options.continuous_usage:
            chunk["usage"] = rows.usage([stream])
        return chunk


def _choice(index: int, delta: Mapping[str, object]) -> dict[str, object]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None,
        "matched_stop": None,
    }
