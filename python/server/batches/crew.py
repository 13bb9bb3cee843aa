"""The batches that are worked on side by side, each by a job that can fail by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from trunkline.engine.client import EngineDied
from trunkline.server import logs
from trunkline.server.batches.job import BatchJob, Workshop
from trunkline.server.batches.lease import LeaseLost
from trunkline.server.batches.records import BatchRecord

SIDE_BY_SIDE: Final = 16
_POLL_S: Final = 1.0  # other processes take new batches and requests to cancel
_REST_S: Final = 10.0  # after a failure of the server's own


class Crew:
    """Jobs under one grant of the lease; `disband` must be called at the end."""

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._jobs: dict[str, tuple[BatchJob, asyncio.Task[None]]] = {}

    def assign(self, batches: Sequence[BatchRecord]) -> None:
        """Begin with batches that are new, while there is room, and stop those to be cancelled.

        What needs no more lines run always finds room.
        """
        for batch in batches:
            is_cancelled = batch.status == "cancelling"
            needs_no_room = is_cancelled or batch.expires_at <= time.time()
            if batch.id in self._jobs:
                if is_cancelled:
                    self._jobs[batch.id][0].cancel()
            elif needs_no_room or len(self._jobs) < SIDE_BY_SIDE:
                job = BatchJob(batch.id, self._shop)
                self._jobs[batch.id] = job, asyncio.create_task(_guarded(batch.id, job))

    async def next_change(self, wake: asyncio.Event) -> None:
        """Return when a job has ended, at `wake`, and at last when it is time to look again."""
        woken = asyncio.create_task(wake.wait())
        tasks = [task for _, task in self._jobs.values()]
        try:
            await asyncio.wait(
                (*tasks, woken), timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            woken.cancel()

    def collect(self) -> bool:
        """Let go of the jobs that have ended; whether there were any.

        Raises:
            LeaseLost: one of them found out.
        """
        ended = [batch_id for batch_id, (_, task) in self._jobs.items() if task.done()]
        for batch_id in ended:
            _, task = self._jobs.pop(batch_id)
            task.result()
        return bool(ended)

    async def disband(self) -> None:
        """Stop all jobs, and return when they have stopped."""
        tasks = [task for _, task in self._jobs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _guarded(batch_id: str, job: BatchJob) -> None:
    """Run a job; one that fails by itself rests, and does not hold up the others.

    Raises:
        LeaseLost: another process works on the batches now.
    """
    try:
        await job.run()
    except LeaseLost:
        raise
    except EngineDied as error:
        logs.SERVER.warning("%s waits for the engine: %s", batch_id, error)
        await asyncio.sleep(_REST_S)
    except Exception:
        logs.SERVER.exception("%s failed in the server and is tried again", batch_id)
        await asyncio.sleep(_REST_S)
