"""`trunkline.Engine`: an engine inside your own Python process.

The loop runs in a thread of the process: no child process, no signal handler, no global state.
Calls from asyncio are served in the caller's own event loop; synchronous calls, from any thread,
wait for a small event loop that the engine keeps in a second thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar, Unpack

from trunkline.engine import launch
from trunkline.engine.client import EngineDied, Request, Stream, merged
from trunkline.engine.config import settings_line
from trunkline.engine.embeddings import EncodeJob, PromptFields, encode_output, parse_encode
from trunkline.engine.local import EngineHost
from trunkline.engine.native_request import (
    GenerateJob,
    RequestContext,
    RequestFields,
    RequestOptions,
    parse_generate,
)
from trunkline.engine.outputs import OutputOptions, generate_output
from trunkline.engine.scoring import (
    RerankWishes,
    ScoreWishes,
    rerank_fields,
    rerank_output,
    rerank_requests,
    score_fields,
    score_requests,
    scores,
)
from trunkline.engine.suggestions import did_you_mean
from trunkline.engine.tokenizer import Tokenizer
from trunkline.engine.validation import Limits, RequestError
from trunkline.engine.weights import open_checkpoint

Value = TypeVar("Value")
Output = dict[str, Any]

# A shorter prompt is tokenised where it is; a longer one would hold up the caller's event loop.
INLINE_CHARS = 16384


class Engine:
    """A model, ready to generate.

    Example:
        >>> with Engine() as engine:  # doctest: +SKIP
        ...     print(engine.generate("The capital of France is")["text"])

    Every method may be called from any thread, any number of engines may live in one process, and
    no `__main__` guard is needed. Leave it by `with`, or call `shutdown`; an engine that is garbage
    collected shuts down by itself. In a fork of the process its calls raise `EngineDied`.
    """

    def __init__(self, model_path: str | None = None, **settings: Any) -> None:
        """Load a model.

        Args:
            model_path: Hugging Face directory, hub id or `.gguf` file; None: the embedded default.
            settings: any engine setting by its flat name (`max_total_tokens=4096`). The log
                goes to the logger "trunkline"; `log_level` is that of this engine alone.

        Raises:
            TypeError: a setting does not exist.
            SettingError: a setting is out of range, or does not fit model and machine.
            CheckpointError: the model cannot be loaded.
        """
        config = launch.engine_config({"model_path": model_path, **settings})
        launch.check_is_single(config)
        logger = _own_logger(config.log_level if "log_level" in settings else None)
        logger.info("%s", settings_line(config))
        checkpoint = open_checkpoint(config.model)
        launched = launch.build(config, checkpoint, logger)
        facts = launched.facts
        self._logger = logger
        self._host = EngineHost(launched)
        self._finalizer = weakref.finalize(self, self._host.close)
        self._tokenizer = checkpoint.tokenizer
        self._chat_template = checkpoint.chat_template
        self._weight_version = facts.weight_version
        limits = Limits(
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            hidden_size=checkpoint.config.hidden_size,
        )
        self._native = RequestContext.of(config.scheduler, self._tokenizer, limits, {})
        chat_defaults = {**checkpoint.generation.sampling, "max_new_tokens": None}
        self._chat = replace(self._native, defaults=chat_defaults)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
        *,
        stream: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Any:
        """Generate, waiting for the end; as `/generate`, whose fields are keywords here.

        Args:
            prompt: one text or several; or None, with `input_ids`.
            sampling_params: one dict for all prompts, or one per prompt.
            stream: return an iterator of outputs that grow; leaving it early aborts the request.
            fields: see `RequestFields`.

        Returns:
            A dict for one prompt, a list of dicts for several or for `n` above 1; an iterator of
            dicts if `stream`.

        Raises:
            RequestError: the request cannot be served; the message names field and limit.
            RequestRefused: the engine could not take it (its queue is full, say).
            EngineDied: the engine was shut down or has failed.
        """
        job = self._parse(self._native, prompt, sampling_params, stream, fields)
        return self._iterate(job) if stream else self._host.run(self._complete(job))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
        *,
        stream: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Any:
        """Like `generate`, without blocking the event loop; a stream is an async iterator."""
        texts = prompt if isinstance(prompt, list) else [prompt]
        job = await _offload(
            sum(len(str(text)) for text in texts),
            lambda: self._parse(self._native, prompt, sampling_params, stream, fields),
        )
        return self._stream(job) if stream else await self._complete(job)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        **fields: Unpack[RequestFields],
    ) -> Any:
        """Answer a conversation: the model's chat template around `generate`.

        What the model recommends is the default of the sampling parameters, and the answer may be
        as long as the context allows.

        Args:
            messages: dicts with `role` and `content`.
            sampling_params: as in `generate`.
            stream: as in `generate`.
            template_arguments: variables for the template, such as `enable_thinking`.
            fields: see `RequestFields`.

        Returns:
            As `generate`; `text` is the answer.

        Raises:
            ChatTemplateError: the template does not take these messages.
        """
        job = self._parse_chat(messages, sampling_params, stream, template_arguments, fields)
        return self._iterate(job) if stream else self._host.run(self._complete(job))

    async def async_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        **fields: Unpack[RequestFields],
    ) -> Any:
        """Like `chat`, without blocking the event loop; a stream is an async iterator."""
        job = await _offload(
            sum(len(str(message)) for message in messages),
            lambda: self._parse_chat(messages, sampling_params, stream, template_arguments, fields),
        )
        return self._stream(job) if stream else await self._complete(job)

    def encode(
        self,
        prompt: str | list[str] | None = None,
        *,
        dimensions: int | None = None,
        **fields: Unpack[PromptFields],
    ) -> Any:
        """Embed prompts, as `/encode`: the final hidden state of a prompt's last token.

        Args:
            prompt: one text or several; or None, with `input_ids`.
            dimensions: how many leading elements are kept; None keeps all.
            fields: see `PromptFields`.

        Returns:
            A dict with `embedding` (a list of floats, of length 1) and `meta_info`; a list of dicts
            for several prompts.

        Raises:
            RequestError, RequestRefused, EngineDied: as `generate`.
        """
        job = self._parse_encode(prompt, dimensions, fields)
        return self._host.run(self._embed(job))

    async def async_encode(
        self,
        prompt: str | list[str] | None = None,
        *,
        dimensions: int | None = None,
        **fields: Unpack[PromptFields],
    ) -> Any:
        """Like `encode`, without blocking the event loop."""
        texts = prompt if isinstance(prompt, list) else [prompt]
        job = await _offload(
            sum(len(str(text)) for text in texts),
            lambda: self._parse_encode(prompt, dimensions, fields),
        )
        return await self._embed(job)

    def score(
        self,
        query: str | list[int],
        items: str | list[str] | list[list[int]],
        label_token_ids: list[int],
        **wishes: Unpack[ScoreWishes],
    ) -> list[list[float]]:
        """How likely given tokens are to come next, after the query with each item.

        Args:
            query: a text, or token ids.
            items: what follows it, or several; as the query, texts or token ids.
            label_token_ids: the tokens.
            wishes: see `ScoreWishes`.

        Returns:
            For every item the chance of every label.

        Raises:
            RequestError, RequestRefused, EngineDied: as `generate`.
        """
        return self._host.run(self.async_score(query, items, label_token_ids, **wishes))

    async def async_score(
        self,
        query: str | list[int],
        items: str | list[str] | list[list[int]],
        label_token_ids: list[int],
        **wishes: Unpack[ScoreWishes],
    ) -> list[list[float]]:
        """Like `score`, without blocking the event loop."""
        fields = score_fields(query=query, items=items, label_token_ids=label_token_ids, **wishes)
        requests, labels = await _offload(
            len(query) + sum(map(len, items)),
            lambda: score_requests(fields, self._native, uuid.uuid4().hex, _options_now()),
        )
        streams = await self._finish(requests)
        return [scores(stream.samples[0], labels) for stream in streams]

    def rerank(
        self, query: str, documents: list[str], **wishes: Unpack[RerankWishes]
    ) -> list[Output]:
        """Put documents in order by how well they answer a query, with a model trained for it.

        Args:
            query: the question.
            documents: the texts.
            wishes: see `RerankWishes`.

        Returns:
            Dicts with `score`, `document`, `index` and `meta_info`, the best first.

        Raises:
            RequestError: also if the model is no reranker.
            RequestRefused, EngineDied: as `generate`.
        """
        return self._host.run(self.async_rerank(query, documents, **wishes))

    async def async_rerank(
        self, query: str, documents: list[str], **wishes: Unpack[RerankWishes]
    ) -> list[Output]:
        """Like `rerank`, without blocking the event loop."""
        fields = rerank_fields(query=query, documents=documents, **wishes)
        rid = uuid.uuid4().hex
        requests, labels = await _offload(
            sum(map(len, documents)),
            lambda: rerank_requests(fields, self._native, self._chat_template, rid, _options_now()),
        )
        streams = await self._finish(requests)
        return rerank_output(fields, streams, labels, self._weight_version)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def flush_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while requests run or wait."""
        return bool(self._control("flush_cache")["flushed"])

    def server_info(self) -> dict[str, object]:
        """The engine's resolved settings, sizes and counters."""
        return self._control("server_info")

    def abort(self, rid: str) -> None:
        """End the request, or one sample (`<rid>_<k>`), with this id; unknown ids do nothing."""
        self._host.run(self._abort(rid))

    def abort_all(self) -> None:
        """End every request."""
        self._host.run(self._abort(None))

    def check_integrity(self) -> None:
        """Check every invariant of scheduler and prefix cache; a debugging aid.

        Raises:
            ControlFailed: one does not hold: a bug.
        """
        self._control("check_integrity")

    def shutdown(self) -> None:
        """End the engine: memory, threads and descriptors are given back. Idempotent.

        Requests in flight fail with `EngineDied`.
        """
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _parse(
        self,
        context: RequestContext,
        prompt: str | list[str] | None,
        sampling_params: Mapping[str, Any] | list[Mapping[str, Any]] | None,
        stream: bool,
        fields: RequestFields,
    ) -> GenerateJob:
        unknown = fields.keys() - RequestFields.__annotations__.keys()
        if unknown:
            names = sorted(unknown)
            close = did_you_mean(names[0], RequestFields.__annotations__)
            raise TypeError(f"unknown request fields: {', '.join(names)}{close}")
        body = {"text": prompt, "sampling_params": sampling_params, "stream": stream, **fields}
        job = parse_generate(body, context)
        self._name_ignored(job.ignored)
        return job

    def _name_ignored(self, names: Sequence[str]) -> None:
        if names:
            self._logger.warning("without effect in this request: %s", ", ".join(names))

    def _parse_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any] | None,
        stream: bool,
        template_arguments: Mapping[str, Any] | None,
        fields: RequestFields,
    ) -> GenerateJob:
        if fields.get("input_ids") is not None:
            raise RequestError("chat makes them of its messages: leave input_ids out.", "input_ids")
        arguments, reads = template_arguments or {}, self._chat_template.reads
        self._name_ignored([f"template_arguments.{one}" for one in arguments if not reads(one)])
        text = self._chat_template.render(messages, **arguments)
        input_ids = self._tokenizer.encode(text, add_special_tokens=False)
        fields = {**fields, "input_ids": input_ids}
        return self._parse(self._chat, None, sampling_params, stream, fields)

    def _control(self, verb: str) -> dict[str, object]:
        async def ask() -> dict[str, object]:
            return await (await self._host.client()).control(verb)

        return self._host.run(ask())

    async def _abort(self, rid: str | None) -> None:
        (await self._host.client()).abort(rid)

    def _parse_encode(
        self, prompt: str | list[str] | None, dimensions: int | None, fields: PromptFields
    ) -> EncodeJob:
        unknown = fields.keys() - PromptFields.__annotations__.keys()
        if unknown:
            raise TypeError(f"unknown request fields: {', '.join(sorted(unknown))}")
        return parse_encode({"text": prompt, "dimensions": dimensions, **fields}, self._native)

    async def _embed(self, job: EncodeJob) -> Output | list[Output]:
        streams = await self._finish(job.requests)
        now, version = time.time(), self._weight_version
        outputs = [encode_output(one, now, job.dimensions, version) for one in streams]
        return outputs if job.is_batch else outputs[0]

    async def _finish(self, requests: Sequence[Request]) -> list[Stream]:
        """Run requests to their ends."""
        client = await self._host.client()
        streams = [client.submit(request) for request in requests]
        try:
            for stream in streams:
                await stream.finished()
        finally:
            _abort_all(streams)
        return streams

    async def _complete(self, job: GenerateJob) -> Output | list[Output]:
        options = self._options(job)
        streams = await self._finish(job.requests)
        now = time.time()
        outputs = [
            generate_output(stream, sample, now, options)
            for stream in streams
            for sample in stream.samples
        ]
        return outputs if job.is_batch or len(outputs) > 1 else outputs[0]

    async def _stream(self, job: GenerateJob) -> AsyncGenerator[Output, None]:
        client = await self._host.client()
        options = self._options(job)
        streams = [client.submit(request) for request in job.requests]
        first_index = dict(
            zip(streams, accumulate((len(s.samples) for s in streams), initial=0), strict=False)
        )
        single = not job.is_batch and len(streams[0].samples) == 1
        try:
            async for stream, updates in merged(streams):
                for update in updates:
                    index = None if single else first_index[stream] + update.sample.index
                    yield generate_output(stream, update.sample, time.time(), options, index=index)
        finally:
            _abort_all(streams)

    def _iterate(self, job: GenerateJob) -> Iterator[Output]:
        outputs = self._stream(job)
        try:
            while (output := self._host.run(_next(outputs))) is not None:
                yield output
        finally:
            with contextlib.suppress(EngineDied):  # then nothing is left to abort
                self._host.run(outputs.aclose())

    def _options(self, job: GenerateJob) -> OutputOptions:
        return OutputOptions(
            weight_version=self._weight_version,
            streamed=job.stream,
            token_text=self._token_text if job.return_text_in_logprobs else None,
            prompt_token_ids=job.return_prompt_token_ids,
        )

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _own_logger(level: str | None) -> logging.Logger:
    """A logger below "trunkline" for one engine: its level is nobody else's."""
    parent = logging.getLogger("trunkline")
    logger = logging.Logger("trunkline.engine", level.upper() if level else logging.NOTSET)
    logger.parent = parent
    return logger


def _options_now() -> RequestOptions:
    return RequestOptions(received_ts=time.time())


async def _next(outputs: AsyncIterator[Output]) -> Output | None:
    return await anext(outputs, None)


async def _offload(num_chars: int, work: Callable[[], Value]) -> Value:
    """Tokenise `num_chars` here when they are few, else in a thread."""
    return work() if num_chars < INLINE_CHARS else await asyncio.to_thread(work)


def _abort_all(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.abort()
