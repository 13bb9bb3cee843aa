"""The two threads of an embedded engine, and its clients: one per asyncio loop that uses it.

The engine's loop has a thread. Synchronous callers need an asyncio loop that outlives their calls
and runs while they wait: a second thread has one, started by the first such call. Neither thread
holds a reference to what the user holds, so that garbage collection can end them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from trunkline.engine.channel import LocalHub
from trunkline.engine.client import Client, EngineDied
from trunkline.engine.launch import LaunchedEngine
from trunkline.engine.loop import EngineLoop
from trunkline.engine.messages import EngineStatus

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

END_GRACE_S: Final = 1.0


class EngineHost:
    """Runs a launched engine in this process until `close`; to be called from any thread."""

    def __init__(self, engine: LaunchedEngine) -> None:
        self._pid = os.getpid()
        self._hub = LocalHub()
        self._loop: EngineLoop | None = engine.loop(self._hub, self._hub.beat)
        self._waiter: _LoopThread | None = None
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()  # guards the three above
        self._thread = threading.Thread(
            target=_serve, args=(self._loop, self._hub), name="trunkline-engine", daemon=True
        )
        self._hub.announce_ready(engine.facts)
        self._thread.start()

    def status(self) -> EngineStatus:
        """Where the engine stands now."""
        return self._hub.status()

    async def client(self) -> Client:
        """The client of the running asyncio loop.

        Raises:
            EngineDied: the engine was shut down.
        """
        loop = asyncio.get_running_loop()
        self._check_process()
        with self._lock:
            if self._loop is None:
                raise EngineDied("the engine was shut down")
            for other in [other for other in self._clients if other.is_closed()]:
                del self._clients[other]
            client = self._clients.get(loop)
            if client is not None:
                return client
            client = self._clients[loop] = Client(self._hub.channel())
        await client.start()
        return client

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine in the host's own asyncio loop and wait for it; cancel it on the way out.

        Raises:
            EngineDied: the engine was shut down.
        """
        try:
            self._check_process()
        except EngineDied:
            coroutine.close()
            raise
        with self._lock:
            if self._loop is None:
                coroutine.close()
                raise EngineDied("the engine was shut down")
            if self._waiter is None:
                self._waiter = _LoopThread()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._waiter.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the engine and its threads; what is in flight fails with `EngineDied`. Idempotent.

        Called by the garbage collector in one of the two threads, it ends that one without waiting.
        """
        if os.getpid() != self._pid:  # it is the parent's, and goes on there
            return
        with self._lock:
            loop, self._loop = self._loop, None
            waiter, self._waiter = self._waiter, None
        if loop is not None:
            loop.stop()
            _join(self._thread)
        if waiter is not None:
            waiter.close()
        self._clients.clear()

    def _check_process(self) -> None:
        """Refuse to wait for threads that a fork has left behind (locks may be held as well)."""
        if os.getpid() != self._pid:
            raise EngineDied(
                f"the engine lives in process {self._pid}, of which this one is a fork: "
                "make an engine of its own here, or fork before there is one"
            )


class _LoopThread:
    """A thread that runs an asyncio loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self.loop,), name="trunkline-waiter", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Let what runs there end, then end the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        _join(self._thread)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_end_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _end_tasks() -> None:
    """Let callers see that the engine is gone; cancel what does not care."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=END_GRACE_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _serve(loop: EngineLoop, hub: LocalHub) -> None:
    try:
        loop.run()
    except Exception as error:
        logger.exception("The engine has failed")
        hub.announce_dead(f"the engine has failed: {type(error).__name__}: {error}")
    else:
        hub.announce_dead("the engine was shut down")


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()
