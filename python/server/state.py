"""What the handlers of one app share. Created by `create_app`, reached through `request.app`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from trunkline.engine.client import Client, ControlFailed, EngineDied
from trunkline.engine.messages import EngineStatus
from trunkline.engine.native_request import RequestContext, TextEncoder
from trunkline.engine.validation import RequestError
from trunkline.server import logs
from trunkline.server.config import ServerConfig
from trunkline.server.metrics import Metrics
from trunkline.server.token_text import TokenTexts

Value = TypeVar("Value")

# A loop that has not gone round for this long is stuck, not busy: steps are bounded.
HEARTBEAT_LIMIT_S = 60.0
# Work on fewer characters than this costs less than handing it to a thread.
_INLINE_CHARS = 4096
_MAX_NAMED_FIELDS = 256


class Tokenizer(TextEncoder, Protocol):
    """What the server needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""

    def token_of(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""


class ChatTemplate(Protocol):
    """What the server needs of a chat template; `ValueError`s of `render` are the client's."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a chat."""


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
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True, kw_only=True)
class Server:
    """One app's state. `native` and `openai` differ in the defaults under a request's sampling.

    `in_flight` counts generations; `idle` is set while there are none. `children` maps the id of a
    request that has several prompts to the ids of its parts; `named_fields` are the unknown fields
    that the log has named.
    """

    client: Client
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    config: ServerConfig
    model: ServedModel
    native: RequestContext
    openai: RequestContext
    metrics: Metrics
    token_texts: TokenTexts
    children: dict[str, list[str]] = field(default_factory=dict)
    named_fields: set[str] = field(default_factory=set)
    starting: bool = False
    draining: bool = False
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def begin(self) -> None:
        """Count a generation that starts."""
        self.in_flight += 1
        self.idle.clear()

    def end(self) -> None:
        """Count a generation that has ended."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()

    def note_ignored(self, names: Sequence[str]) -> None:
        """Log each unknown body field the first time that a client sends it."""
        for name in names:
            if name not in self.named_fields and len(self.named_fields) < _MAX_NAMED_FIELDS:
                self.named_fields.add(name)
                logs.SERVER.warning("ignoring the unknown request field %.80r", name)

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

    async def control(self, verb: str, **arguments: str | float | bool | None) -> dict[str, object]:
        """Ask the engine; as `Client.control`."""
        return await self.client.control(verb, **arguments)

    async def refresh_engine_metrics(self, timeout_s: float = 1.0) -> None:
        """Fetch the engine's figures; the last ones stay if it does not answer in time."""
        self.metrics.engine_up = self.unhealthy() is None
        try:
            stats = await asyncio.wait_for(self.client.control("stats"), timeout_s)
        except (TimeoutError, EngineDied, ControlFailed):
            return
        self.metrics.engine = engine_figures(stats, self.client.status)

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


def engine_figures(stats: dict[str, object], status: EngineStatus) -> dict[str, float]:
    """The engine's figures by their metric names (`metrics.ENGINE_GAUGES`)."""
    numbers = {
        name: float(value) for name, value in stats.items() if isinstance(value, int | float)
    }
    capacity = float(status.facts.max_total_tokens) if status.facts else 0.0
    used = numbers.get("used_tokens", 0.0)
    figures = {
        "num_running_reqs": numbers.get("running", 0.0),
        "num_queue_reqs": numbers.get("queued", 0.0),
        "num_used_tokens": used,
        "token_usage": used / capacity if capacity else 0.0,
        "gen_throughput": numbers.get("gen_throughput", 0.0),
        "cache_hit_rate": _hit_rate(numbers),
        "max_total_num_tokens": capacity,
    }
    return figures


def _hit_rate(numbers: dict[str, float]) -> float:
    cached = numbers.get("cached_tokens_total", 0.0)
    total = cached + numbers.get("prompt_tokens_computed_total", 0.0)
    return cached / total if total else 0.0


def server_of(request: Request) -> Server:
    """The state of the app that a request came to."""
    server: Server = request.app.state.server
    return server


async def offload(chars: int, work: Callable[[], Value]) -> Value:
    """Do CPU work on about `chars` characters: here when short, else in a thread."""
    return work() if chars < _INLINE_CHARS else await asyncio.to_thread(work)
