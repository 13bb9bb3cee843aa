"""Works on the unfinished batches, in one process at a time.

Sleeps until it is woken or a look at the database is due; takes the lease when there is work; lets
a crew of jobs do it, which share one bound on what is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from trunkline.server import logs
from trunkline.server.batches.crew import SIDE_BY_SIDE, Crew
from trunkline.server.batches.database import Database
from trunkline.server.batches.files import FileStore
from trunkline.server.batches.gate import Gate
from trunkline.server.batches.job import Workshop
from trunkline.server.batches.lease import LEASE_S, Lease, LeaseLost
from trunkline.server.batches.results import Results
from trunkline.server.batches.store import BatchStore
from trunkline.server.state import Server

_IDLE_POLL_S: Final = 5.0  # other processes add batches, and lose the lease
_CLEAN_S: Final = 600.0
_REST_S: Final = 10.0  # after a failure of the server's own
_SHARE: Final = 4  # of what may run, a quarter is for batches; while others wait, a quarter of that
_MOST: Final = 64
_MOST_ON_CPU: Final = 16  # more rows make its steps longer for all, and few tokens more


class Worker:
    """Runs in the app's loop from `start` to `stop`."""

    def __init__(
        self, server: Server, database: Database, store: BatchStore, files: FileStore
    ) -> None:
        self._server = server
        self._database = database
        self._store = store
        self._files = files
        self._lease = Lease()
        self._gate = Gate(self._limit)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._clean_due = 0.0  # by the monotonic clock

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(self._serve())

    def wake(self) -> None:
        """Say that there is a new batch, or one to cancel."""
        self._wake.set()

    async def stop(self) -> None:
        """Stop at once; lines in flight are aborted, and run again by who goes on. Idempotent."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])

    def _limit(self) -> int:
        """The weight that may be in flight; less while there are other requests."""
        most = self._server.config.batches.batch_concurrency
        if most is None:
            facts = self._server.client.status.facts
            if facts is None:
                return 1
            bound = _MOST_ON_CPU if facts.device == "cpu" else _MOST
            most = min(bound, facts.max_running_requests // _SHARE)
        return max(1, most // _SHARE if self._server.in_flight else most)

    async def _serve(self) -> None:
        while True:
            try:
                self._wake.clear()
                await self._clean()
                if await self._store.unfinished(1):
                    await self._work()
                await self._sleep(_IDLE_POLL_S)
            except LeaseLost as error:
                logs.SERVER.warning("%s", error)
            except Exception:
                logs.SERVER.exception("the work on batches failed and is tried again")
                await asyncio.sleep(_REST_S)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    async def _clean(self) -> None:
        if time.monotonic() >= self._clean_due:
            self._clean_due = time.monotonic() + _CLEAN_S
            await self._files.clean()
            await self._store.clear_results()

    async def _work(self) -> None:
        """Work on batches until there is none left, if nobody else does."""
        token = await self._database.write(self._lease.acquire)
        if token is None:
            return
        renewal = asyncio.create_task(self._renew(token))
        jobs = asyncio.create_task(self._run_jobs(token))
        try:
            await asyncio.wait((renewal, jobs), return_when=asyncio.FIRST_COMPLETED)
            for task in (renewal, jobs):
                if task.done():
                    task.result()
        finally:
            for task in (renewal, jobs):
                task.cancel()
            await asyncio.wait((renewal, jobs))
            await self._database.write(lambda connection: self._lease.release(connection, token))

    async def _renew(self, token: int) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self._database.write(lambda connection: self._lease.renew(connection, token))

    async def _run_jobs(self, token: int) -> None:
        shop = Workshop(
            server=self._server,
            store=self._store,
            files=self._files,
            results=Results(self._database, token),
            gate=self._gate,
            token=token,
        )
        crew = Crew(shop)
        try:
            while True:
                self._wake.clear()
                batches = await self._store.unfinished(SIDE_BY_SIDE)
                if not batches:
                    return
                crew.assign(batches)
                await self._clean()
                await crew.next_change(self._wake)
                if crew.collect():
                    await self._store.clear_results()
        finally:
            await crew.disband()
