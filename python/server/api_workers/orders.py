"""What the first HTTP process and its API workers say to each other: one JSON object per line."""

from __future__ import annotations

import msgspec

from trunkline.engine.messages import EngineStatus
from trunkline.server.config import ServerConfig
from trunkline.server.metrics import Snapshot


class Boot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First line to a worker: who it is.

    `listener` is the number of its inherited listening socket, `relay_path` the Unix socket of the
    first process, `client` its number at the engines, whose directories are given by rank. With
    `is_serving` the server is warm already: the worker replaces one that has died.
    """

    config: ServerConfig
    listener: int
    relay_path: str
    client: int
    engine_directories: list[str]
    is_serving: bool


class Told(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine's status. A worker answers one that is for suspects with `Settled`."""

    rank: int
    status: EngineStatus


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The server is warm: health checks may say so."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End the request with this id if it came to this worker; None: all."""

    rid: str | None


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new, let what is in flight end, exit."""


Order = Boot | Told | Serving | Abort | Drain


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The worker takes orders, and waits to be told of the engines."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The worker can serve."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker could not start."""

    error: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing that the worker had at an earlier life of the engine is suspect."""

    rank: int
    epoch: int


class Trying(msgspec.Struct, frozen=True, tag=True):
    """The worker will say `Settled`, but still tries suspects."""


class Counted(msgspec.Struct, frozen=True, tag=True):
    """What the worker has counted since it was started."""

    snapshot: Snapshot


Answer = Connected | Loaded | Failed | Settled | Trying | Counted


def line(message: msgspec.Struct) -> bytes:
    """A message as it is written."""
    return msgspec.json.encode(message) + b"\n"
