"""How busy the engine is, for routers: a header on every response, and GET /v1/loads.

The header tells what this process has asked of the engine and not got yet, which it knows at every
moment, and how full the KV pool was when the engine last said so. /v1/loads asks the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import metadata
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.engine.client import Client
from trunkline.engine.fleet import Fleet
from trunkline.engine.messages import EngineFacts
from trunkline.engine.validation import RequestError, shown
from trunkline.server.answer import ignored_headers
from trunkline.server.http import json_response
from trunkline.server.metrics import EngineFigures
from trunkline.server.state import server_of

HEADER: Final = b"x-trunkline-load"
BLOCKS: Final = ("core", "memory", "queues", "spec", "lora", "disagg", "all")
_EMPTY: Final = frozenset(("spec", "lora", "disagg"))  # of what other engines have
_SUMS: Final = (
    "num_running_reqs num_waiting_reqs num_waiting_uncached_tokens num_used_tokens "
    "num_total_tokens max_total_num_tokens max_running_requests"
).split()
_COUNTED: Final = 256  # more streams are not counted for each response
_FRESH_S: Final = 0.02  # but when the last count is so old


class MemoryLoad(msgspec.Struct, kw_only=True):
    """Where the memory has gone."""

    weight_gb: float
    kv_cache_gb: float
    token_capacity: int


class QueueLoad(msgspec.Struct, kw_only=True):
    """The engine's queue."""

    waiting: int
    retracted: int


class Load(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The load of one engine.

    Tokens are those of the KV pool. `num_total_tokens` are used or will be once the waiting prompts
    are computed; `num_waiting_uncached_tokens` are tokens of waiting prompts that the prefix cache
    does not hold; `utilization` is the share of `max_running_requests`.
    """

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    memory: MemoryLoad | None = None
    queues: QueueLoad | None = None


class Aggregate(msgspec.Struct, kw_only=True):
    """The loads of all engines together; `num_ranks` is how many there should be."""

    num_ranks: int
    num_ready_ranks: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    gen_throughput: float
    token_usage: float
    utilization: float


class Loads(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The loads of a server's engines that are ready; `timestamp` is when they were asked.

    `aggregate` is there if the server has several engines: sums and, of shares, means weighted by
    what they are shares of.
    """

    timestamp: float
    version: str
    accelerator: str
    num_accelerators: int
    loads: list[Load]
    aggregate: Aggregate | None = None


class LoadHeader:
    """Writes the header of one app. Belongs to the app's asyncio loop."""

    def __init__(self, client: Client | Fleet, engines: Sequence[EngineFigures]) -> None:
        """`engines` is where the engines' last figures are found."""
        self._client = client
        self._engines = engines
        self._value = b""
        self._made_at = float("-inf")

    def value(self) -> bytes:
        """A dictionary in the syntax of RFC 9651: `running=2, waiting=1, ...`."""
        now = time.monotonic()
        in_flight = sum(len(replica.in_flight) for replica in self._client.replicas)
        if in_flight <= _COUNTED or now - self._made_at > _FRESH_S:
            self._made_at = now
            self._value = b", ".join(b"%s=%d" % item for item in self._counts().items())
        return self._value

    def _counts(self) -> dict[bytes, int]:
        running = waiting = waiting_tokens = 0
        for stream in (one for replica in self._client.replicas for one in replica.in_flight):
            if any(sample.started for sample in stream.samples):
                running += sum(not sample.finished for sample in stream.samples)
            else:
                waiting += 1
                waiting_tokens += len(stream.request.prompt_ids)
        counts = {b"running": running, b"waiting": waiting, b"waiting_tokens": waiting_tokens}
        facts = self._client.status.facts
        if facts is not None:
            counts |= {
                b"used_tokens": sum(
                    int(one.values.get("num_used_tokens", 0)) for one in self._engines
                ),
                b"total_tokens": facts.max_total_tokens,
                b"max_running": facts.max_running_requests,
            }
        return counts


async def loads(request: Request) -> Response:
    """The load of each engine, as routers poll it. Answered between two steps of the engine."""
    server = server_of(request)
    blocks = _blocks(request.query_params.get("include", "core"))
    query = request.query_params
    if query.get("format", "json") != "json":
        raise RequestError("format must be json; /metrics has the same in Prometheus text.")
    wanted = _rank(query.get("dp_rank"), server.native.dp_size)
    await server.refresh_engine_metrics()
    ranks = [
        _load(replica.status.facts, figures, blocks)
        for figures, replica in zip(server.metrics.engines, server.client.replicas, strict=True)
        if figures.values and replica.status.facts and wanted in (None, figures.rank)
    ]
    facts = server.client.status.facts
    if facts is None or not ranks:
        raise RequestError("the engine has not told its load yet.", status=503)
    several = server.native.dp_size > 1 and wanted is None
    device = facts.device.partition(":")[0]
    answer = Loads(
        timestamp=time.time(),
        version=metadata.version("trunkline"),
        accelerator=device,
        num_accelerators=1 if device == "cpu" else server.native.dp_size,
        loads=ranks,
        aggregate=_aggregate(ranks, server.native.dp_size) if several else None,
    )
    ignored = [f"include.{name}" for name in sorted(blocks & _EMPTY)]
    server.note_ignored(ignored)
    return json_response(msgspec.to_builtins(answer), headers=ignored_headers(ignored))


def _rank(text: str | None, dp_size: int) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) >= dp_size:
        raise RequestError(
            f"dp_rank must be an integer in [0, {dp_size - 1}], got {shown(text)}.", "dp_rank"
        )
    return int(text)


def _aggregate(loads: Sequence[Load], dp_size: int) -> Aggregate:
    def total(name: str) -> int:
        return sum(getattr(load, name) for load in loads)

    return Aggregate(
        num_ranks=dp_size,
        num_ready_ranks=len(loads),
        **{name: total(name) for name in _SUMS},
        gen_throughput=sum(load.gen_throughput for load in loads),
        token_usage=total("num_used_tokens") / total("max_total_num_tokens"),
        utilization=total("num_running_reqs") / total("max_running_requests"),
    )


def _blocks(names: str) -> set[str]:
    wanted = {name.strip() for name in names.split(",")} - {""}
    unknown = wanted.difference(BLOCKS)
    if unknown:
        raise RequestError(
            f"include must hold some of {', '.join(BLOCKS)}, got {shown(sorted(unknown)[0])}.",
            "include",
        )
    return set(BLOCKS) - _EMPTY if "all" in wanted else wanted


def _load(facts: EngineFacts, engine: EngineFigures, blocks: set[str]) -> Load:
    figures = engine.values

    def count(name: str) -> int:
        return int(figures.get(name, 0))

    used, coming = count("num_used_tokens"), count("num_waiting_uncached_tokens")
    return Load(
        timestamp=engine.told_ts,
        dp_rank=engine.rank,
        num_running_reqs=count("num_running_reqs"),
        num_waiting_reqs=count("num_queue_reqs"),
        num_waiting_uncached_tokens=coming,
        num_used_tokens=used,
        num_total_tokens=used + coming,
        max_total_num_tokens=facts.max_total_tokens,
        max_running_requests=facts.max_running_requests,
        token_usage=figures.get("token_usage", 0.0),
        gen_throughput=figures.get("gen_throughput", 0.0),
        cache_hit_rate=figures.get("cache_hit_rate", 0.0),
        utilization=count("num_running_reqs") / facts.max_running_requests,
        memory=MemoryLoad(
            weight_gb=round(facts.weight_bytes / 2**30, 3),
            kv_cache_gb=round(facts.kv_cache_bytes / 2**30, 3),
            token_capacity=facts.max_total_tokens,
        )
        if "memory" in blocks
        else None,
        queues=QueueLoad(
            waiting=count("num_queue_reqs"), retracted=count("num_retracted_requests_total")
        )
        if "queues" in blocks
        else None,
    )
