"""One request in flight: what was asked, and its samples as they grow.

A `Stream` is made by `client.Client`, which feeds it the engine's events; it keeps all that a
resubmission needs. It knows nothing of channels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from trunkline.engine import messages
from trunkline.engine.messages import Logprobs, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated, tokenised request.

    `stream_interval` is the number of tokens between updates; 0 gives one at the end. With `pooled`
    the samples end with a pooled state and without tokens. `received_ts` is when the API saw it
    (unix seconds). `dp_rank` names the one of several engines that must run it.
    """

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    stream_interval: int = 1
    priority: int = 0
    namespace: str = ""
    request_class: int = 0
    logprobs: messages.LogprobRequest | None = None
    grammar: messages.GrammarSpec | None = None
    dp_rank: int | None = None
    pooled: bool = False
    received_ts: float

    def sample_rid(self, index: int) -> str:
        """The id by which an abort names one sample alone."""
        return f"{self.rid}_{index}"


class RequestRefused(Exception):
    """The engine never took the request: nothing was computed."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param


class EngineDied(Exception):
    """The engine is gone, and with it the request; or it is not there yet."""


class DeadlyRequest(EngineDied):
    """The engine died each time that it ran this request, the last time of nothing else."""


class EventsLost(EngineDied):
    """The engine's events do not join: a bug. The request is aborted."""


class Update(NamedTuple):
    """What came new for one sample. Offsets are absolute: tokens, and code points of the text."""

    sample: Sample
    text: str
    token_ids: list[int]
    token_offset: int
    text_offset: int
    logprobs: Logprobs | None
    finished: bool


class Sample:
    """The growing state of one sample of a request; read-only for callers.

    `output_ids` and the log-prob lists grow in place. `first_token_ts` and `finished_ts` are when
    this side saw the first token and the end (unix seconds).
    """

    __slots__ = (
        "_length",
        "_parts",
        "finished",
        "finished_ts",
        "first_token_ts",
        "index",
        "num_retractions",
        "output_ids",
        "output_logprobs",
        "prompt_logprobs",
        "started",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_retractions = 0
        self.output_ids: list[int] = []
        self.started: messages.Started | None = None
        self.finished: messages.Finished | None = None
        self.output_logprobs: Logprobs | None = None
        self.prompt_logprobs: Logprobs | None = None
        self.first_token_ts: float | None = None
        self.finished_ts: float | None = None
        self._parts: list[str] = []
        self._length = 0

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def abort_event(self, key: int) -> messages.Finished:
        """What an engine would say if it ended the sample here, at the client's wish."""
        return messages.Finished(
            key=key,
            sample=self.index,
            token_offset=len(self.output_ids),
            token_ids=[],
            text_offset=self._length,
            text="",
            logprobs=None,
            prompt_logprobs=None,
            reason="abort",
            matched=None,
            message="the request was aborted",
            status=0,
            completion_tokens=len(self.output_ids),
            num_retractions=self.num_retractions,
            queue_time=self.started.queue_time if self.started else 0.0,
        )

    def _apply(self, event: messages.Delta | messages.Finished, now: float) -> Update:
        """Add what the event brings beyond what is known already."""
        known_tokens = len(self.output_ids) - event.token_offset
        known_text = self._length - event.text_offset
        if known_tokens < 0 or known_text < 0:
            raise EventsLost(
                f"events were lost: sample {self.index} has {len(self.output_ids)} tokens and "
                f"{self._length} characters, the next event starts at token {event.token_offset} "
                f"and character {event.text_offset}"
            )
        token_ids = event.token_ids[known_tokens:]
        text = event.text[known_text:]
        logprobs = _slice(event.logprobs, known_tokens)
        update = Update(
            sample=self,
            text=text,
            token_ids=token_ids,
            token_offset=len(self.output_ids),
            text_offset=self._length,
            logprobs=logprobs,
            finished=isinstance(event, messages.Finished),
        )
        self.output_ids.extend(token_ids)
        if text:
            self._parts.append(text)
            self._length += len(text)
        self.output_logprobs = _joined(self.output_logprobs, logprobs)
        if self.prompt_logprobs is None:  # a restarted engine may tell them again
            self.prompt_logprobs = event.prompt_logprobs
        if self.first_token_ts is None and token_ids:
            self.first_token_ts = now
        self.num_retractions = event.num_retractions
        if isinstance(event, messages.Finished):
            self.finished = event
            self.finished_ts = now
        return update


# How a request leaves its place: to its end; refused, or lost with its engine; ended by its client.
Outcome = Literal["completed", "refused", "cancelled"]


class Place(Protocol):
    """The account that is kept of a stream's engine, where there are several."""

    @property
    def rank(self) -> int:
        """Which engine it is."""

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt its cache was thought to hold."""

    def started(self) -> None:
        """The first token is there; may be told again."""

    def ended(self, outcome: Outcome) -> None:
        """The stream has ended, or goes on elsewhere."""


class Stream:
    """One request in flight. Belongs to its client's asyncio loop; one consumer at a time.

    `dp_rank` is the engine that has it, or had it at its end; None where there is only one. `moves`
    counts how often it went from one to another; `predicted_cached` is how many tokens of the
    prompt the last one was thought to have cached.
    """

    def __init__(
        self, request: Request, key: int, epoch: int, abort: Callable[[Stream], None]
    ) -> None:
        self.request = request
        self.dp_rank: int | None = None
        self.moves = 0
        self.predicted_cached = 0
        self._place: Place | None = None
        self.samples = [Sample(index) for index in range(request.n)]
        self.dispatched_ts = 0.0
        self.key = key
        self.epoch = epoch
        # Engines that died without a token for this request, in a row: that had begun to run it, or
        # may have; and that had not.
        self.deaths = 0
        self.idle_deaths = 0
        self.is_resubmission = False
        self._submitted_tokens = 0
        self._to_end: set[int] = set()  # samples that were aborted, by index
        self._abort = abort
        self._unfinished = request.n
        self._accepted = False
        self._error: Exception | None = None
        self._pending: dict[int, Update] = {}
        self._wake = asyncio.Event()

    async def accepted(self) -> None:
        """Return once the engine has taken the request.

        Raises:
            RequestRefused: the engine never took it.
            EngineDied: the engine was lost before it answered.
        """
        while not self._accepted:
            if self._error is not None:
                raise self._error
            await self._sleep()

    async def finished(self) -> None:
        """Return once every sample has finished.

        Raises:
            RequestRefused: the engine never took the request.
            EngineDied: the engine was lost before the end.
        """
        while self._unfinished:
            if self._error is not None:
                raise self._error
            await self._sleep()
        self._pending.clear()

    def __aiter__(self) -> AsyncIterator[list[Update]]:
        """Yield all that is new per wake-up, one merged update per sample, until all have finished.

        Raises:
            RequestRefused: the engine never took the request.
            EngineDied: the engine was lost; updates that came before are yielded first.
        """
        return self._updates()

    async def _updates(self) -> AsyncIterator[list[Update]]:
        async for _, updates in merged([self]):
            yield updates

    def _take(self) -> list[Update]:
        """All that is new since the last call; raises what ended the stream once that is taken."""
        if not self._pending and self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return list(pending.values())

    @property
    def _drained(self) -> bool:
        return not self._unfinished and not self._pending

    @property
    def has_gained(self) -> bool:
        """Whether a token has come since the request was last submitted."""
        return self._num_tokens > self._submitted_tokens

    @property
    def _num_tokens(self) -> int:
        return sum(len(sample.output_ids) for sample in self.samples)

    def resubmitted(self, key: int, epoch: int) -> None:
        """Belong to another engine life from now on, under another key; called by the client.

        It is no resubmission of a request that has been held back all the time.
        """
        self.key = key
        self.epoch = epoch
        self.is_resubmission = self.dispatched_ts > 0
        self._submitted_tokens = self._num_tokens

    def placed(self, place: Place | None) -> None:
        """Be accounted for there until the end; called by the client."""
        self._place = place
        self.dp_rank = place.rank if place else None
        self.predicted_cached = place.cached_tokens if place else 0

    def moved(self, place: Place, abort: Callable[[Stream], None]) -> None:
        """Belong to another client from now on; called by it."""
        self._leave("refused")
        self.placed(place)
        self.moves += 1
        self._abort = abort

    def _leave(self, outcome: Outcome) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.ended(outcome)

    def abort(self) -> None:
        """Ask the engine to end the request. Idempotent, and harmless after the end."""
        self._abort(self)

    def progress(self) -> list[messages.Resume]:
        """What a resubmission carries: one entry per sample."""
        return [
            messages.Resume(output_ids=sample.output_ids, delivered_chars=sample._length)
            for sample in self.samples
        ]

    async def _sleep(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def fail(self, error: Exception) -> None:
        """End with an error; called by the client."""
        self._error = error
        self._leave("cancelled" if self._to_end else "refused")
        self._wake.set()

    def want_end(self, rid: str | None = None) -> None:
        """Note what was aborted, by the rules of `messages.Abort`; called by the client."""
        if rid in (None, self.request.rid):
            self._to_end.update(range(self.request.n))
        else:
            request = self.request
            self._to_end.update(k for k in range(request.n) if request.sample_rid(k) == rid)

    def end_aborted(self, now: float) -> bool:
        """End here what was aborted and no engine has; True when nothing is left."""
        for sample in self.samples:
            if sample.index in self._to_end and sample.finished is None:
                self.apply(sample.abort_event(self.key), now)
        return self._unfinished == 0

    def apply(self, event: messages.Event, now: float) -> bool:
        """Take one event; True when it was the last. Called by the client."""
        match event:
            case messages.Accepted():
                self._accepted = True
            case messages.Refused():
                self._error = RequestRefused(event.status, event.kind, event.message, event.param)
                self._leave("refused")
                self._wake.set()
                return True
            case messages.Started():
                sample = self.samples[event.sample]
                sample.started = sample.started or event
                if self._place is not None:
                    self._place.started()
            case messages.Delta() | messages.Finished():
                self._accepted = True
                sample = self.samples[event.sample]
                if sample.finished is not None:  # a restarted engine comes to its end again
                    return False
                update = sample._apply(event, now)
                earlier = self._pending.get(event.sample)
                self._pending[event.sample] = (
                    update if earlier is None else _merged(earlier, update)
                )
                self._unfinished -= update.finished
                if not self._unfinished:
                    self._leave("cancelled" if self._to_end else "completed")
        self._wake.set()
        return self._unfinished == 0


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[Stream, list[Update]]]:
    """Yield the updates of several streams as they come, each with its stream, until all end.

    Raises:
        RequestRefused: the engine did not take one of them.
        EngineDied: the engine was lost.
    """
    wake = asyncio.Event()
    for stream in streams:
        stream._wake = wake
    running = list(streams)
    while running:
        wake.clear()
        for stream in running:
            if updates := stream._take():
                yield stream, updates
        running = [stream for stream in running if not stream._drained]
        if running:
            await wake.wait()


def _slice(logprobs: Logprobs | None, start: int) -> Logprobs | None:
    if logprobs is None or start == 0:
        return logprobs
    return Logprobs(logprobs.values[start:], logprobs.top[start:], logprobs.ids[start:])


def _joined(known: Logprobs | None, new: Logprobs | None) -> Logprobs | None:
    """Both parts in one; the lists of `known` grow in place."""
    if new is None:
        return known
    if known is None:
        return Logprobs(list(new.values), list(new.top), list(new.ids))
    known.values.extend(new.values)
    known.top.extend(new.top)
    known.ids.extend(new.ids)
    return known


def _merged(earlier: Update, later: Update) -> Update:
    logprobs = earlier.logprobs
    if logprobs is not None:
        logprobs = Logprobs(list(logprobs.values), list(logprobs.top), list(logprobs.ids))
    return Update(
        sample=earlier.sample,
        text=earlier.text + later.text,
        token_ids=[*earlier.token_ids, *later.token_ids],
        token_offset=earlier.token_offset,
        text_offset=earlier.text_offset,
        logprobs=_joined(logprobs, later.logprobs),
        finished=later.finished,
    )
