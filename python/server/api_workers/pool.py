"""The first HTTP process's side of its API workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from trunkline.engine.client import Client
from trunkline.engine.fleet import Fleet
from trunkline.engine.process import (
    BACKOFF_S,
    CLIENT,
    STABLE_S,
    EngineProcess,
    child_environment,
    socket_parent,
)
from trunkline.engine.runtime_directory import RuntimeDirectory
from trunkline.server import logs
from trunkline.server.api_workers.orders import (
    Abort,
    Answer,
    Boot,
    Connected,
    Counted,
    Drain,
    Failed,
    Loaded,
    Order,
    Serving,
    Settled,
    Told,
    Trying,
    line,
)
from trunkline.server.api_workers.turns import Turns
from trunkline.server.config import ServerConfig
from trunkline.server.metrics import Metrics

MODULE: Final = "trunkline.server.api_workers.child"
_LINE_BYTES: Final = 1 << 24
_POLL_S: Final = 0.02
_EXIT_S: Final = 5.0  # a worker whose lifeline is closed has this long


class WorkerFailed(Exception):
    """An API worker could not start; the message says why."""


@dataclass(slots=True)
class _Child:
    """One life of one worker."""

    process: subprocess.Popen[bytes]
    orders: asyncio.WriteTransport
    number: int  # its client number at the engines; no other life ever had it
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    settled: dict[int, int] = field(default_factory=dict)  # rank -> epoch
    heard_at: float = 0.0  # its last answer
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None
    is_alive: bool = True

    def send(self, order: Order) -> None:
        if not self.orders.is_closing():  # its end is noticed where its answers are read
            self.orders.write(line(order))


class ApiWorkers:
    """Starts and supervises the workers, and tells them of the engines."""

    def __init__(
        self,
        config: ServerConfig,
        engines: Sequence[EngineProcess],
        client: Client | Fleet,
        listeners: Sequence[socket.socket],
    ) -> None:
        """Prepare; a worker for each of `listeners`. The engines' channels must be open.

        `relay` is the socket at which the first process must serve what workers hand on to it.
        """
        self._directory = RuntimeDirectory(socket_parent())
        self._relay_path = self._directory.path / "http"
        self.relay = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.relay.bind(str(self._relay_path))
        self.relay.setblocking(False)
        self._config = config
        self._engines = engines
        self._listeners = listeners
        self._children: dict[int, _Child] = {}  # by place
        self._numbers = itertools.count(CLIENT + 1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: list[asyncio.Task[None]] = []  # by place
        self._turns = Turns(engines, client, self._children.values)
        self._is_serving = False
        self._closing = asyncio.Event()
        self.metrics: Metrics | None = None

    def start(self) -> None:
        """Start all; `loaded` waits for them."""
        for rank, engine in enumerate(self._engines):
            engine.watch(partial(self._engine_changed, rank))
        for place in range(len(self._listeners)):
            self._keepers.append(self._spawn_task(self._keep(place)))

    async def loaded(self) -> None:
        """Return once every worker can serve.

        Raises:
            WorkerFailed: one could not start.
        """
        for place, keeper in enumerate(self._keepers):
            while (child := self._children.get(place)) is None or not child.loaded.is_set():
                if keeper.done():
                    why = child.error if child is not None else None
                    raise WorkerFailed(why or "an API worker could not be started")
                await asyncio.sleep(_POLL_S)

    def serve(self, metrics: Metrics) -> None:
        """The server is warm; from now on the workers' counts go into `metrics`."""
        self._is_serving = True
        self.metrics = metrics
        self._tell_all(Serving())

    def abort(self, rid: str | None) -> None:
        """End a request wherever it came in; None: all."""
        self._tell_all(Abort(rid))

    async def close(self, grace_s: float = 0.0) -> None:
        """Let what is in flight end within `grace_s`; all have exited on return. Idempotent."""
        self._closing.set()
        self._tell_all(Drain())
        if self._keepers:
            _, late = await asyncio.wait(self._keepers, timeout=grace_s + _EXIT_S)
            if late:
                for child in self._children.values():
                    child.process.kill()
                await asyncio.wait(late)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._directory.close()

    def kill(self) -> None:
        """End all at once."""
        for child in self._children.values():
            child.process.kill()
        self._directory.close()

    def _tell_all(self, order: Order) -> None:
        for child in self._children.values():
            child.send(order)

    async def _keep(self, place: int) -> None:
        """Have a worker at a place until `close`, or until none can start."""
        try:
            await self._keep_alive(place)
        finally:
            self._listeners[place].close()  # connections would wait here for nobody

    async def _keep_alive(self, place: int) -> None:
        """Run one worker after another."""
        failures = 0
        while not self._closing.is_set():
            started_at = time.monotonic()
            child = self._children[place] = await self._spawn(place)
            if self._closing.is_set():
                child.send(Drain())
            await self._follow(child)
            if self.metrics is not None:
                self.metrics.ended(child.number)
            if self._closing.is_set():
                return
            if not child.loaded.is_set() and failures == 0:
                child.error = child.error or f"an API worker {_end(child)}"
                return
            failures = 1 if time.monotonic() - started_at > STABLE_S else failures + 1
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
            logs.SERVER.error(
                "API worker %d %s; starting it again in %.0f s", place + 1, _end(child), pause_s
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)

    async def _spawn(self, place: int) -> _Child:
        read_end, write_end = os.pipe()
        listener = self._listeners[place].fileno()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(write_end)],
                stdin=subprocess.PIPE,
                pass_fds=(write_end, listener),
                env=child_environment(),
                start_new_session=True,
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        orders, _ = await asyncio.get_running_loop().connect_write_pipe(
            asyncio.BaseProtocol, process.stdin
        )
        child = _Child(process, orders, next(self._numbers))
        directories = [engine.directory for engine in self._engines]
        child.send(
            Boot(
                config=self._config,
                listener=listener,
                relay_path=str(self._relay_path),
                client=child.number,
                engine_directories=[str(directory) for directory in directories],
                is_serving=self._is_serving,
            )
        )
        self._spawn_task(self._read(child, read_end))
        return child

    async def _follow(self, child: _Child) -> None:
        """Wait for the end of a worker's life; let it to the engines once it has loaded."""
        while child.is_alive:
            child.changed.clear()
            if child.connected.is_set() and not child.settled:
                child.settled = dict.fromkeys(range(len(self._engines)), 0)
                for rank in range(len(self._engines)):
                    self._engine_changed(rank)
            await child.changed.wait()
        while child.process.poll() is None:
            await asyncio.sleep(_POLL_S)

    async def _read(self, child: _Child, read_end: int) -> None:
        """Take a worker's answers until its end of the pipe is closed."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        try:
            while text := await reader.readline():
                self._take(child, msgspec.json.decode(text, type=Answer))
        except (ValueError, msgspec.MsgspecError):
            child.process.kill()  # nobody would hear it any more
            raise
        finally:
            transport.close()
            child.is_alive = False
            child.changed.set()

    def _take(self, child: _Child, answer: Answer) -> None:
        child.heard_at = time.monotonic()
        match answer:
            case Connected():
                child.connected.set()
            case Loaded():
                child.loaded.set()
            case Failed(error):
                child.error = error
            case Settled(rank=rank, epoch=epoch):
                child.settled[rank] = epoch
            case Trying():
                pass  # it says that it lives
            case Counted(snapshot):
                if self.metrics is not None:
                    self.metrics.include(child.number, snapshot)
        child.changed.set()

    def _engine_changed(self, rank: int) -> None:
        status = self._engines[rank].status()
        if status.access == "suspects":
            self._spawn_task(self._turns.take(rank))
        else:
            self._tell_all(Told(rank=rank, status=status))

    def _spawn_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            logs.SERVER.error("the supervision of the API workers failed", exc_info=error)


def _end(child: _Child) -> str:
    code = child.process.returncode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
