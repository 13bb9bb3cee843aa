"""Several engines behind one client: data parallelism inside one process.

Each *rank* is a whole engine with a `Client` of its own; a request runs on one of them, whichever
the Rust router chooses by load and probable cache contents, or the one that it names. Its tokens do
not depend on the rank, so what a dead engine had goes on at another at once, with two exceptions
that bound what one fatal request can do: a request moves once at most, and one that is suspected of
killing engines (`recovery.py`) does not move. What does not move waits for its own rank.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from trunkline._core import Router, RouterError
from trunkline.engine.channel import Channel
from trunkline.engine.client import Client, EngineDied, Request, Stream
from trunkline.engine.config import EngineConfig
from trunkline.engine.messages import EngineFacts, EngineStatus
from trunkline.engine.recovery import is_suspect
from trunkline.engine.stream import Outcome

logger = logging.getLogger(__name__)

DEFAULT_METHOD: Final = "cache_aware"
# How a rank is chosen -> the router's policy.
METHODS: Final[Mapping[str, str]] = {
    "cache_aware": "cache_aware",
    "round_robin": "round_robin",
    "shortest_queue": "least_requests",
    "total_requests": "least_requests",
    "total_tokens": "least_load",
}


def balance_method(config: EngineConfig) -> str:
    """How a rank is to be chosen, one of `METHODS`."""
    method = config.parallel.load_balance_method
    if method != "auto":
        return method
    return "total_tokens" if config.cache.disable_radix_cache else DEFAULT_METHOD


class Fleet:
    """Submits requests to the ranks; what `client.Client` is to one engine.

    Belongs to the asyncio loop that `start` runs in; every method must be called there.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        method: str = DEFAULT_METHOD,
        *,
        is_shared: bool = False,
    ) -> None:
        """Prepare.

        Args:
            channels: one for each rank, in order.
            method: how a rank is chosen, of `METHODS`.
            is_shared: other processes submit to the same engines.
        """
        self._is_shared = is_shared
        self._clients = tuple(
            Client(channel, partial(self._rank_changed, rank))
            for rank, channel in enumerate(channels)
        )
        self._policy = METHODS[method]
        self._router: Router | None = None  # once every rank has been ready
        self._homes: dict[str, _Place] = {}  # by request id
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Connect all; returns before they are ready."""
        for client in self._clients:
            await client.start()

    async def ready(self, rank: int | None = None) -> None:
        """Return once requests can be taken: the first time by every rank, later by any.

        Args:
            rank: wait for this one.

        Raises:
            EngineDied: that will never be; the message says why.
        """
        if self._router is None:
            await asyncio.gather(*(client.ready() for client in self._clients))
            self._open()
        if rank is not None:
            await self._clients[rank].ready()
            return
        while (status := self.status).state != "ready":
            if status.state == "dead":
                raise EngineDied(status.error or "the engines have stopped")
            self._changed.clear()
            await self._changed.wait()

    async def close(self, reason: str = "the client was closed") -> None:
        """Abort what is in flight, fail what waits, and let go of all engines. Idempotent."""
        await asyncio.gather(*(client.close(reason) for client in self._clients))

    @property
    def replicas(self) -> tuple[Client, ...]:
        """The client of each rank: for reading, not for submitting."""
        return self._clients

    @property
    def status(self) -> EngineStatus:
        """Where the engines stand together.

        Ready while any is, once all have been; then `error` says what ails the others, and `facts`
        add up the ready ones.
        """
        statuses = [client.status for client in self._clients]
        ready = [status for status in statuses if status.state == "ready"]
        errors = [
            f"rank {rank}: {status.error or status.state}"
            for rank, status in enumerate(statuses)
            if status.state != "ready"
        ]
        dead = sum(status.state == "dead" for status in statuses)
        if self._router is None:
            is_ready, is_dead = len(ready) == len(statuses), dead > 0
        else:
            is_ready, is_dead = bool(ready), dead == len(statuses)
        ages = [one.heartbeat_age_s for one in ready if one.heartbeat_age_s is not None]
        return EngineStatus(
            state="ready" if is_ready else "dead" if is_dead else "starting",
            epoch=sum(status.epoch for status in statuses),
            heartbeat_age_s=min(ages, default=None),
            facts=_together([one.facts for one in ready or statuses if one.facts is not None]),
            error="; ".join(errors) or None,
        )

    def submit(self, request: Request) -> Stream:
        """Send a request to a rank; see `Client.submit`.

        One whose id is in flight goes where that is, to be refused as a duplicate.
        """
        place = self._choose(request)
        if place is None:
            return self._unready(request.dp_rank).submit(request)
        self._homes.setdefault(request.rid, place)
        return self._clients[place.rank].submit(request, place)

    def abort(self, rid: str | None = None) -> None:
        """Ask every engine to end the request or sample with this id; None: all."""
        for client in self._clients:
            client.abort(rid)

    async def flush_cache(self) -> bool:
        """Empty the caches of all ranks that are idle; whether that was every one of them.

        Raises:
            EngineDied: no engine is ready.
        """
        ready = [rank for rank, one in enumerate(self._clients) if one.status.state == "ready"]
        if not ready:
            raise EngineDied(self.status.error or "no engine is ready")
        return all(await asyncio.gather(*(self._flush(rank) for rank in ready)))

    async def _flush(self, rank: int) -> bool:
        try:
            flushed = await self._clients[rank].flush_cache()
        except EngineDied:
            return True  # its cache is gone with it
        if flushed and self._router is not None:
            self._router.forget_cache(rank)
        return flushed

    def report(self, rank: int, figures: Mapping[str, float]) -> None:
        """Note what a rank said of its load, by the names of the metrics.

        What it has to do is known here better, unless others send it requests too.
        """
        if self._router is not None:
            told = figures if self._is_shared else {}
            self._router.report(
                rank,
                time.monotonic(),
                running=int(told.get("num_running_reqs", 0)),
                waiting=int(told.get("num_queue_reqs", 0)),
                waiting_uncached_tokens=int(told.get("num_waiting_uncached_tokens", 0)),
                kv_used=figures["token_usage"],
            )

    def _open(self) -> None:
        """Give the router its ranks, which are all ready or have been."""
        if self._router is not None:
            return
        facts = [client.status.facts for client in self._clients]
        page_sizes = {one.page_size for one in facts if one is not None}
        config = json.dumps({"policy": self._policy}).encode()
        self._router = Router(config, block_tokens=min(page_sizes))
        for rank, one in enumerate(facts):
            assert one is not None, "an engine that was ready has facts"
            worker = self._router.add_worker(str(rank), one.max_total_tokens)
            assert worker == rank, "workers are numbered as they come"
            self._rank_changed(rank)

    def _choose(self, request: Request, *, but: int | None = None) -> _Place | None:
        """A place for a request, counted in its rank's load from now on; None: no rank is ready.

        A rank where suspects are tried lets others wait: it gets them only if there is no other.
        """
        if self._router is None:
            return None
        only = None if request.dp_rank is None else [request.dp_rank]
        if request.rid in self._homes and but is None:
            only = [self._homes[request.rid].rank]
        prompt = array.array("I", request.prompt_ids).tobytes()
        holding = [rank for rank, client in enumerate(self._clients) if client.is_holding]
        never = [] if but is None else [but]
        for exclude in ([*never, *holding], never) if holding else (never,):
            try:
                rank, ticket, cached = self._router.select(
                    prompt,
                    time.monotonic(),
                    namespace=request.namespace.encode(),
                    only=only,
                    exclude=exclude,
                )
            except RouterError:
                continue
            return _Place(self, request.rid, rank, ticket, cached)
        return None

    def _unready(self, rank: int | None) -> Client:
        """A client that fails what is submitted, and says why."""
        unready = (one for one in self._clients if one.status.state != "ready")
        return self._clients[rank] if rank is not None else next(unready, self._clients[0])

    def _rank_changed(self, rank: int) -> None:
        """A rank's engine has died, is there again, or has been opened."""
        if self._router is not None:
            is_ready = self._clients[rank].status.state == "ready"
            self._router.set_ready(rank, is_ready)
            if not is_ready:
                self._router.forget_cache(rank)
            self._move()
        self._changed.set()

    def _move(self) -> None:
        """Let ready ranks go on with what dead ones had."""
        if all(client.status.state != "ready" for client in self._clients):
            return
        for rank, client in enumerate(self._clients):
            if client.status.state == "ready":
                continue
            moving = [stream for stream in client.held if _may_move(stream)]
            for stream in moving:
                place = self._choose(stream.request, but=rank)
                if place is None:
                    return
                client.release(stream)
                self._homes[stream.request.rid] = place
                self._clients[place.rank].adopt(stream, place)
            if moving:
                logger.warning("%d requests of rank %d go on at other ranks", len(moving), rank)

    def started(self, place: _Place) -> None:
        """The first token is there."""
        assert self._router is not None, "places are made by the router"
        self._router.started(place.ticket)

    def ended(self, place: _Place, outcome: Outcome) -> None:
        """The request has left its place."""
        assert self._router is not None, "places are made by the router"
        self._router.finished(place.ticket, outcome, time.monotonic())
        if self._homes.get(place.rid) is place:
            del self._homes[place.rid]


class _Place:
    """Where a stream is: its rank, and the router's account of it. See `stream.Place`."""

    __slots__ = ("_fleet", "cached_tokens", "rank", "rid", "ticket")

    def __init__(self, fleet: Fleet, rid: str, rank: int, ticket: int, cached_tokens: int) -> None:
        self._fleet = fleet
        self.rid = rid
        self.rank = rank
        self.ticket = ticket
        self.cached_tokens = cached_tokens

    def started(self) -> None:
        self._fleet.started(self)

    def ended(self, outcome: Outcome) -> None:
        self._fleet.ended(self, outcome)


def _may_move(stream: Stream) -> bool:
    pinned = stream.request.dp_rank is not None
    return not pinned and stream.moves == 0 and not is_suspect(stream)


def _together(facts: Sequence[EngineFacts]) -> EngineFacts | None:
    """The facts of several engines of one model as those of one: sizes are added."""
    if not facts:
        return None
    sums = {
        name: sum(getattr(one, name) for one in facts)
        for name in ("max_total_tokens", "max_running_requests", "weight_bytes", "kv_cache_bytes")
    }
    return msgspec.structs.replace(facts[0], **sums, startup_s=max(one.startup_s for one in facts))
