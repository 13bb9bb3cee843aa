"""POST /v1/completions: the response, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trunkline.engine.client import Sample, Stream, Update
from trunkline.engine.messages import Logprobs
from trunkline.server.openai import rows
from trunkline.server.openai.logprobs import TextOffsets, completion_logprobs
from trunkline.server.state import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What a response repeats, and what it holds besides text; `extra` are keys of its own.

    `echoed` are the prompts' texts if they go before the answers.
    """

    id: str
    model: str
    created: int
    include_usage: bool
    continuous_usage: bool
    echoed: list[str] | None
    token_ids: rows.TokenIds = field(default_factory=rows.TokenIds)
    extra: Mapping[str, object] = field(default_factory=dict)


class CompletionReply:
    """Rows and chunks of the completions of one or several prompts."""

    def __init__(self, server: Server, options: CompletionOptions) -> None:
        self._texts = server.token_texts
        self._weight_version = server.config.engine.model.weight_version
        self._options = options
        self._fingerprint = rows.fingerprint(server.client.status.facts)
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()

    def whole(self, streams: Sequence[Stream]) -> object:
        choices = []
        for prompt, stream in enumerate(streams):
            for sample in stream.samples:
                echo = self._echo(prompt)
                index = prompt * stream.request.n + sample.index
                choice = _choice(index, echo + sample.text) | rows.finish(sample)
                prompt_part = self._prompt_logprobs(stream, sample, index)
                output_part = self._logprobs(index, sample.output_ids, sample.output_logprobs)
                choice["logprobs"] = _joined(prompt_part, output_part)
                ids = self._options.token_ids
                choices.append(
                    choice | self._once(index, stream) | ids.of_output(sample.output_ids)
                )
        return {
            **self._head(),
            "choices": choices,
            "usage": rows.usage(streams),
            "metadata": rows.metadata(streams, self._weight_version),
        }

    def opening(self, streams: Sequence[Stream]) -> list[object]:
        if self._options.echoed is None or any(s.request.logprobs is not None for s in streams):
            return []  # with log-probs the prompt goes out with its own
        return [
            self._chunk(_choice(index, self._echo(prompt)) | self._once(index, stream))
            for prompt, stream in enumerate(streams)
            for index in self._indices(prompt, stream)
        ]

    def events(self, prompt: int, stream: Stream, updates: Iterable[Update]) -> list[object]:
        chunks: list[object] = []
        for update in updates:
            sample = update.sample
            index = prompt * stream.request.n + sample.index
            if index not in self._offsets and (update.token_ids or update.finished):
                chunks += self._prompt_chunk(prompt, stream, sample, index)
            ids = self._options.token_ids.of_output(update.token_ids)
            if update.text or update.logprobs is not None or (ids and update.token_ids):
                choice = _choice(index, update.text) | self._once(index, stream) | ids
                choice["logprobs"] = self._logprobs(index, update.token_ids, update.logprobs)
                chunks.append(self._with_usage(self._chunk(choice), stream))
            if update.finished:
                choice = _choice(index, "") | self._once(index, stream) | rows.finish(sample)
                choice |= self._options.token_ids.of_output([])
                chunks.append(self._with_usage(self._chunk(choice), stream))
        return chunks

    def _prompt_chunk(
        self, prompt: int, stream: Stream, sample: Sample, index: int
    ) -> list[dict[str, object]]:
        """The echoed prompt with its log-probs, which are complete with the first token."""
        choice = _choice(index, self._echo(prompt))
        choice["logprobs"] = self._prompt_logprobs(stream, sample, index)
        if self._options.echoed is None or stream.request.logprobs is None:
            return []
        choice |= self._once(index, stream)
        return [self._with_usage(self._chunk(choice), stream)]

    def _once(self, index: int, stream: Stream) -> dict[str, object]:
        """What only the first chunk of a choice has."""
        if index in self._begun:
            return {}
        self._begun.add(index)
        return self._options.token_ids.of_prompt(stream)

    @staticmethod
    def _indices(prompt: int, stream: Stream) -> range:
        samples = stream.request.n
        return range(prompt * samples, (prompt + 1) * samples)

    def closing(self, streams: Sequence[Stream]) -> list[object]:
        if not self._options.include_usage:
            return []
        return [{**self._head(), "choices": [], "usage": rows.usage(streams)}]

    def _echo(self, prompt: int) -> str:
        return self._options.echoed[prompt] if self._options.echoed is not None else ""

    def _prompt_logprobs(
        self, stream: Stream, sample: Sample, index: int
    ) -> dict[str, list[object]] | None:
        """The prompt's entries; the answer's may follow then."""
        request = stream.request
        offsets = self._offsets[index] = TextOffsets(
            self._texts,
            self._echo(index // request.n),
            skips_special=request.sampling.skip_special_tokens,
        )
        logprobs = sample.prompt_logprobs if self._options.echoed is not None else None
        return completion_logprobs(request.prompt_ids, logprobs, self._texts, offsets.of_prompt)

    def _logprobs(
        self, index: int, ids: Sequence[int], logprobs: Logprobs | None
    ) -> dict[str, list[object]] | None:
        if logprobs is None:
            return None
        return completion_logprobs(ids, logprobs, self._texts, self._offsets[index].of_output)

    def _head(self) -> dict[str, object]:
        options = self._options
        return {
            "id": options.id,
            "object": "text_completion",
            "created": options.created,
            "model": options.model,
            "system_fingerprint": self._fingerprint,
            **options.extra,
        }

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        return {**self._head(), "choices": [choice]}

    def _with_usage(self, chunk: dict[str, object], stream: Stream) -> dict[str, object]:
        if self._options.continuous_usage:
            chunk["usage"] = rows.usage([stream])
        return chunk


def _choice(index: int, text: str) -> dict[str, object]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": None,
        "matched_stop": None,
    }


def _joined(
    first: dict[str, list[object]] | None, second: dict[str, list[object]] | None
) -> dict[str, list[object]] | None:
    """Both blocks in one."""
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in first}
