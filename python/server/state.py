"""What the handlers of one app share. Created by `create_app`, reached through `request.app`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request

from trunkline.engine.client import Client, ControlFailed, EngineDied
from trunkline.engine.fleet import Fleet
from trunkline.engine.messages import EngineStatus
from trunkline.engine.native_request import RequestContext
from trunkline.engine.validation import RequestError
from trunkline.server import logs
from trunkline.server.config import ServerConfig
from trunkline.server.metrics import EngineFigures, Metrics
from trunkline.server.openai.parsers import Parsers, Template
from trunkline.server.openai.responses_store import ResponseStore
from trunkline.server.token_text import Tokenizer, TokenTexts

if TYPE_CHECKING:
    from trunkline.server.api_workers.pool import ApiWorkers
    from trunkline.server.batches.service import Batches

Value = TypeVar("Value")

# A loop that has not gone round for this long is stuck, not busy: steps are bounded.
HEARTBEAT_LIMIT_S = 60.0
# Work on a shorter body than this costs less than handing it to a thread.
_INLINE_BYTES = 4096
_MAX_NAMED_FIELDS = 256
# How often the engine is asked how full its pool is, while requests are in flight.
_FOLLOW_S = 0.25
# Metric -> its name in the engine's `stats`.
_STATS = {
    "num_running_reqs": "num_running",
    "num_queue_reqs": "num_waiting",
    "num_waiting_uncached_tokens": "num_waiting_uncached_tokens",
    "num_used_tokens": "used_tokens",
    "kv_available_tokens": "free_tokens",
    "kv_evictable_tokens": "evictable_tokens",
    "max_total_num_tokens": "total_tokens",
    "max_running_requests": "max_running",
    "gen_throughput": "gen_throughput",
    "new_token_ratio": "new_token_ratio",
    "num_retracted_requests_total": "retracted_requests_total",
    "evicted_tokens_total": "evicted_tokens_total",
}


class ChatTemplate(Template, Protocol):
    """What the server needs of a chat template; `ValueError`s of `render` are the client's."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat."""

    def reads(self, variable: str) -> bool:
        """Whether the template looks at a variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as the endpoints show it. `created` is when it was loaded (unix seconds)."""

    name: str
    path: str
    tokenizer_path: str
    model_type: str
    architecture: str
    context_length: int
    vocab_size: int
    hidden_size: int
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True, kw_only=True)
class Server:
    """One app's state. `native` and `openai` differ in the defaults under a request's sampling.

    `in_flight` counts generations; `idle` is set while there are none. `children` maps the id of a
    request that has several prompts to the ids of its parts; `named_fields` are the unknown fields
    that the log has named; `background` holds the tasks of responses that nobody waits for.
    `batches` is set by `create_app`; `api_workers` are the other HTTP processes, which
    the first one has.
    """

    client: Client | Fleet
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    config: ServerConfig
    model: ServedModel
    native: RequestContext
    openai: RequestContext
    metrics: Metrics
    token_texts: TokenTexts
    responses: ResponseStore
    parsers: Parsers
    background: set[asyncio.Task[None]] = field(default_factory=set)
    children: dict[str, list[str]] = field(default_factory=dict)
    named_fields: set[str] = field(default_factory=set)
    starting: bool = False
    draining: bool = False
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    api_workers: ApiWorkers | None = None
    batches: Batches = field(init=False)
    _follower: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.idle.set()

    @contextlib.contextmanager
    def running(self, rid: str, parts: list[str]) -> Iterator[None]:
        """Count a generation while it runs, and know its parts by its id."""
        is_parent = len(parts) > 1 and rid not in self.children
        if is_parent:
            self.children[rid] = parts
        self.in_flight += 1
        self.idle.clear()
        # For the header, or where it decides which engine gets a request.
        wanted = self.config.api.load_header or len(self.client.replicas) > 1
        if wanted and (self._follower is None or self._follower.done()):
            self._follower = asyncio.create_task(self._follow_load())
        try:
            yield
        finally:
            if is_parent:
                del self.children[rid]
            self.in_flight -= 1
            if self.in_flight == 0:
                self.idle.set()

    def note_ignored(self, names: Sequence[str]) -> None:
        """Log each body field without effect the first time that a client sends it.

        Raises:
            RequestError: there is one, and the server is strict.
        """
        if names and self.config.api.strict_fields:
            raise RequestError(
                f"{names[0][:80]} is unknown, or has no effect in this request: leave it out, or "
                "start the server without --strict-fields.",
                names[0][:80],
            )
        for name in names:
            if name not in self.named_fields and len(self.named_fields) < _MAX_NAMED_FIELDS:
                self.named_fields.add(name)
                logs.SERVER.warning(
                    "ignoring the request field %.80r: it is unknown, or has no effect", name
                )

    def unhealthy(self) -> str | None:
        """Why the server cannot be relied on now; None when it can."""
        if self.draining:
            return "the server is shutting down"
        if self.starting:
            return "the server is starting"
        status = self.client.status
        if status.state != "ready":
            return status.error or f"the engine is {status.state}"
        return stuck(status)

    async def refresh_engine_metrics(self, timeout_s: float = 1.0) -> None:
        """Fetch the engine's figures; the last ones stay if it does not answer in time."""
        serving = not self.draining and not self.starting
        await asyncio.gather(
            *(
                self._refresh(figures, replica, serving, timeout_s)
                for figures, replica in zip(self.metrics.engines, self.client.replicas, strict=True)
            )
        )

    async def _refresh(
        self, figures: EngineFigures, replica: Client, serving: bool, timeout_s: float
    ) -> None:
        status = replica.status
        figures.is_up = serving and status.state == "ready" and stuck(status) is None
        try:
            stats = await asyncio.wait_for(replica.control("stats"), timeout_s)
        except EngineDied:
            if len(self.client.replicas) > 1:  # the others' figures are those of the server
                figures.values.clear()
            return
        except (TimeoutError, ControlFailed):
            return
        figures.values.update(engine_figures(stats, replica.status))
        figures.told_ts = time.time()
        self.client.report(figures.rank, figures.values)

    async def _follow_load(self) -> None:
        """Keep the figures of the engines fresh until nothing is in flight."""
        while self.in_flight:
            await self.refresh_engine_metrics()
            await asyncio.sleep(_FOLLOW_S)
        await self.refresh_engine_metrics()

    def check_model(self, name: object) -> str:
        """The model name to echo.

        Raises:
            RequestError: it is neither left out, "default" nor the served model's (404).
        """
        if name is None:
            return "default"
        if not isinstance(name, str):
            raise RequestError("model must be a string.", "model")
        if name not in ("default", self.model.name):
            raise RequestError(
                f"The model {name[:200]!r} does not exist; this server has {self.model.name!r}.",
                "model",
                status=404,
                code="model_not_found",
            )
        return name


def stuck(status: EngineStatus) -> str | None:
    """Why an engine that says it is ready is not: its loop stands still."""
    age = status.heartbeat_age_s
    if age is not None and age > HEARTBEAT_LIMIT_S:
        return f"the engine's loop has not moved for {age:.0f} s"
    return None


def engine_figures(stats: Mapping[str, object], status: EngineStatus) -> dict[str, float]:
    """The engine's figures by their metric names (those of `metrics.py`)."""
    numbers = {name: float(one) for name, one in stats.items() if isinstance(one, int | float)}
    figures = {metric: numbers[name] for metric, name in _STATS.items() if name in numbers}
    cached, computed = numbers["cached_tokens_total"], numbers["prompt_tokens_total"]
    figures["cache_hit_rate"] = cached / (cached + computed) if cached + computed else 0.0
    figures["token_usage"] = numbers["used_tokens"] / max(numbers["total_tokens"], 1.0)
    if status.facts is not None:
        figures["context_len"] = float(status.facts.context_length)
    return figures


def server_of(request: Request) -> Server:
    """The state of the app that a request came to."""
    server: Server = request.app.state.server
    return server


async def offload(num_bytes: int, work: Callable[[], Value]) -> Value:
    """Do CPU work on a body of `num_bytes`: here when short, else in a thread."""
    return work() if num_bytes < _INLINE_BYTES else await asyncio.to_thread(work)
