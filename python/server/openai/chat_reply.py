"""POST /v1/chat/completions: the response, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trunkline.engine.client import Sample, Stream, Update
from trunkline.server.openai import rows
from trunkline.server.openai.chat_shapes import deltas, whole_message
from trunkline.server.openai.logprobs import chat_logprobs
from trunkline.server.openai.pieces import ToolCall
from trunkline.server.openai.splitting import OutputSplitter
from trunkline.server.state import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a response repeats, and what it holds besides text; `extra` are keys of its own."""

    id: str
    model: str
    created: int
    include_usage: bool
    continuous_usage: bool
    splitters: Sequence[OutputSplitter]  # one per sample
    token_ids: rows.TokenIds = field(default_factory=rows.TokenIds)
    extra: Mapping[str, object] = field(default_factory=dict)


class ChatReply:
    """Rows and chunks of one chat completion."""

    def __init__(self, server: Server, options: ChatOptions) -> None:
        self._texts = server.token_texts
        self._weight_version = server.config.engine.model.weight_version
        self._options = options
        self._fingerprint = rows.fingerprint(server.client.status.facts)
        self._have_calls = [False] * len(options.splitters)

    def whole(self, streams: Sequence[Stream]) -> object:
        [stream] = streams
        choices = [self._whole_choice(stream, sample) for sample in stream.samples]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self._usage(streams),
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
            choices = [self._delta(sample.index, delta) for delta in self._deltas(update)]
            if update.logprobs is not None or (ids and update.token_ids):
                choices = choices or [self._delta(sample.index, {"content": ""})]
                choices[0] |= ids
                choices[0]["logprobs"] = chat_logprobs(
                    update.token_ids, update.logprobs, self._texts
                )
            if update.finished:
                choices.append(self._delta(sample.index, {}) | self._finish(sample))
            chunks += [self._with_usage(self._chunk(choice), stream) for choice in choices]
        return chunks

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        if not self._options.include_usage:
            return []
        head = self._head("chat.completion.chunk")
        return [{**head, "choices": [], "usage": self._usage(streams)}]

    def _whole_choice(self, stream: Stream, sample: Sample) -> dict[str, object]:
        splitter = self._options.splitters[sample.index]
        message = whole_message([*splitter.feed(sample.text), *splitter.end()])
        self._have_calls[sample.index] = "tool_calls" in message
        return {
            "index": sample.index,
            "message": message,
            "logprobs": chat_logprobs(sample.output_ids, sample.output_logprobs, self._texts),
            **self._finish(sample),
            **self._options.token_ids.of_prompt(stream),
            **self._options.token_ids.of_output(sample.output_ids),
        }

    def _delta(self, index: int, delta: Mapping[str, object]) -> dict[str, object]:
        """A choice of a chunk whose tokens, if they are wanted, are in another one."""
        return _choice(index, delta) | self._options.token_ids.of_output([])

    def _deltas(self, update: Update) -> list[dict[str, object]]:
        index = update.sample.index
        splitter = self._options.splitters[index]
        pieces = splitter.feed(update.text)
        if update.finished:
            pieces += splitter.end()
        self._have_calls[index] |= any(isinstance(piece, ToolCall) for piece in pieces)
        return deltas(pieces)

    def _finish(self, sample: Sample) -> dict[str, object]:
        """How a sample ended; one that stopped after calls ended with them."""
        end = rows.finish(sample)
        if end["finish_reason"] == "stop" and self._have_calls[sample.index]:
            end["finish_reason"] = "tool_calls"
        return end

    def _usage(self, streams: Sequence[Stream]) -> dict[str, object]:
        reasoning = sum(
            self._options.splitters[sample.index].reasoning_tokens(sample.output_ids)
            for stream in streams
            for sample in stream.samples
        )
        usage = rows.usage(streams, reasoning)
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

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
            chunk["usage"] = self._usage([stream])
        return chunk


def _choice(index: int, delta: Mapping[str, object]) -> dict[str, object]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None,
        "matched_stop": None,
    }
