"""An API worker: `python -m trunkline.server.api_workers.child`, started by `pool.py`.

Its standard input is its lifeline: orders come there, and when it closes the worker exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
from setproctitle import setproctitle
from starlette.applications import Starlette

from trunkline.engine.attached import AttachedEngine
from trunkline.engine.client import Client, EngineDied
from trunkline.engine.fleet import Fleet, balance_method
from trunkline.engine.messages import EngineStatus
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
from trunkline.server.api_workers.relay import Relay
from trunkline.server.connections import listen
from trunkline.server.operations import end_requests
from trunkline.server.serve import (
    Gate,
    allow_connections,
    drain,
    load,
    loop_factory,
    unless_set,
)
from trunkline.server.state import Server
from trunkline.server.tls import server_context

_LINE_BYTES: Final = 1 << 24
_COUNT_S: Final = 0.5  # how often it tells what it has counted
_SIGN_OF_LIFE_S: Final = 1.0
_POLL_S: Final = 0.01


class ApiWorker:
    """One worker's life."""

    def __init__(self, boot: Boot, answers: int) -> None:
        """Prepare; `answers` is the pipe to the first process."""
        self._config = boot.config
        self._answers = answers
        self._channels = [AttachedEngine(Path(one), boot.client) for one in boot.engine_directories]
        method = balance_method(boot.config.engine)
        several = len(self._channels) > 1
        self._client = (
            Fleet(self._channels, method, is_shared=True) if several else Client(self._channels[0])
        )
        self._relay_path = boot.relay_path
        self._listener = socket.socket(fileno=boot.listener)
        self._gate, self._stop = Gate(), asyncio.Event()
        self._draining = asyncio.Event()
        self._opened = asyncio.Event()  # connections are accepted
        self._server: Server | None = None
        self._is_serving = boot.is_serving
        self._settling: set[asyncio.Task[None]] = set()

    async def run(self, orders: asyncio.StreamReader) -> None:
        """Serve until told to drain."""
        allow_connections()
        if not self._is_serving:
            self._opened.set()  # 503 is the truth; later, connections rather wait a while
        serving = asyncio.create_task(self._listen())
        await self._client.start()
        following = asyncio.create_task(self._follow(orders))
        try:
            self._answer(Connected())
            app = await unless_set(self._draining, load(self._config, self._client))
            if app is not None:
                await self._serve(app)
        finally:
            following.cancel()
            await self._client.close()
            self._stop.set()
            self._opened.set()
            await serving

    async def _listen(self) -> None:
        await self._opened.wait()
        if not self._stop.is_set():
            http = self._config.http
            await listen(self._gate, self._listener, http, self._stop, server_context(http))

    async def _serve(self, app: Starlette) -> None:
        server: Server = app.state.server
        self._server = server
        server.starting = not self._is_serving
        self._gate.app = Relay(app, self._relay_path)
        self._opened.set()
        self._answer(Loaded())
        counting = asyncio.create_task(self._count(server))
        await self._draining.wait()
        await drain(server, self._client)
        counting.cancel()
        self._answer(Counted(server.metrics.snapshot()))

    async def _follow(self, orders: asyncio.StreamReader) -> None:
        try:
            while text := await orders.readline():
                self._take(msgspec.json.decode(text, type=Order))
        except Exception:
            logs.SERVER.exception("an API worker cannot take its orders")
            os._exit(1)
        os._exit(0)  # the first process is gone, and with it the engines

    def _take(self, order: Order) -> None:
        match order:
            case Told(rank=rank, status=status):
                self._channels[rank].tell(status)
                if status.access == "suspects":
                    task = asyncio.create_task(self._settle(rank, status))
                    self._settling.add(task)
                    task.add_done_callback(self._settling.discard)
            case Serving():
                self._is_serving = True
                if self._server is not None:
                    self._server.starting = False
            case Abort(rid) if self._server is not None:
                end_requests(self._server, rid)
            case Drain():
                self._draining.set()
            case _:
                pass

    async def _settle(self, rank: int, status: EngineStatus) -> None:
        """Say when no request here is suspected of killing the engine any more."""
        channel, client = self._channels[rank], self._client.replicas[rank]
        said_at = time.monotonic()
        while client.is_testing and channel.status().epoch == status.epoch:
            await asyncio.sleep(_POLL_S)
            if time.monotonic() - said_at > _SIGN_OF_LIFE_S:
                said_at = time.monotonic()
                self._answer(Trying())
        if channel.status().epoch == status.epoch:
            self._answer(Settled(rank=rank, epoch=status.epoch))

    async def _count(self, server: Server) -> None:
        last = None
        while True:
            await asyncio.sleep(_COUNT_S)
            snapshot = server.metrics.snapshot()
            if snapshot != last:
                self._answer(Counted(snapshot))
                last = snapshot

    def _answer(self, answer: Answer) -> None:
        with contextlib.suppress(BrokenPipeError):  # the lifeline ends this process
            os.write(self._answers, line(answer))


async def _run(answers: int) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), os.fdopen(0, "rb", 0)
    )
    boot = msgspec.json.decode(await orders.readline(), type=Boot)
    logs.configure(
        boot.config.engine.log_level,
        boot.config.logs.log_level_http,
        boot.config.logs.access_log_exclude_prefixes,
    )
    try:
        await ApiWorker(boot, answers).run(orders)
    except EngineDied as error:  # the first process says so
        os.write(answers, line(Failed(str(error))))
        raise SystemExit(1) from error
    except Exception as error:
        logs.SERVER.exception("an API worker failed")
        os.write(answers, line(Failed(f"an API worker failed: {type(error).__name__}: {error}")))
        raise SystemExit(1) from error


def main() -> None:
    """Be the worker until the first process wants no more of it."""
    setproctitle("engine-serve: API worker")
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    # A signal to the group is the first process's to handle: it drains its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_run(answers))


if __name__ == "__main__":
    main()
