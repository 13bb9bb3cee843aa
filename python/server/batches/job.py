"""One batch, brought to its end from wherever it stands: check, run the lines, write the files.

Every step can be done again: what is stored decides where to go on. Knows one batch; which batches
are worked on, and by whom, is `worker.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from trunkline.engine.client import DeadlyRequest, EngineDied
from trunkline.server import logs
from trunkline.server.answer import Prepared, whole_answer
from trunkline.server.batches import answers
from trunkline.server.batches.files import FileStore
from trunkline.server.batches.gate import Gate, Place
from trunkline.server.batches.lines import (
    LINE_KINDS,
    BadLine,
    Line,
    Problem,
    RawLine,
    Validation,
    line_id,
    parse_line,
    raw_lines,
)
from trunkline.server.batches.output import write_files
from trunkline.server.batches.records import BatchRecord
from trunkline.server.batches.results import Answer, Results
from trunkline.server.batches.store import BatchStore
from trunkline.server.errors import FAILURES, Failure
from trunkline.server.state import Server, offload

_BATCH_CLASS: Final = 1
_PAGE_LINES: Final = 32
_PAGE_BYTES: Final = 1 << 20
_ANY_BYTES: Final = 1 << 40  # lines that were found good stay so under another limit
_REST_LINES: Final = 500
_BUSY_S: Final = 1.0  # before a line is tried again that the engine had no room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What the jobs of one grant of the lease share."""

    server: Server
    store: BatchStore
    files: FileStore
    results: Results
    gate: Gate
    token: int


class BatchJob:
    """One batch at work."""

    def __init__(self, batch_id: str, shop: Workshop) -> None:
        self._id = batch_id
        self._shop = shop
        self._stop = asyncio.Event()

    def cancel(self) -> None:
        """Stop running lines: the batch is being cancelled."""
        self._stop.set()

    async def run(self) -> None:
        """Bring the batch to its end.

        Raises:
            LeaseLost: another process works on the batches now.
            EngineDied: the engine will not come back.
        """
        try:
            batch = await self._answer_all()
        except FileNotFoundError as error:
            logs.SERVER.error("the input of %s is gone: %s", self._id, error)
            problem = Problem("missing_file", "The input file is gone.")
            await self._shop.store.fail(self._shop.token, self._id, [problem])
            return
        if batch.outcome is not None:
            output, error_file = await write_files(batch, self._shop.files, self._shop.results)
            await self._shop.store.finish(self._shop.token, batch, output, error_file)
            logs.SERVER.info("%s is %s", self._id, batch.outcome)

    async def _answer_all(self) -> BatchRecord:
        """Bring the batch to where every line has an answer, or its input was found to be bad.

        Raises:
            FileNotFoundError: its input is gone.
        """
        store, token = self._shop.store, self._shop.token
        batch = await store.get(self._id)
        if batch.status == "validating":
            await self._validate(batch)
            batch = await store.get(self._id)
        if batch.status == "in_progress":
            outcome = await self._run_lines(batch)
            await store.conclude(token, self._id, outcome)
            batch = await store.get(self._id)
        if batch.status == "cancelling" and batch.outcome is None:
            await store.conclude(token, self._id, "cancelled")
            batch = await store.get(self._id)
        if batch.outcome in answers.UNANSWERED and batch.in_progress_at is not None:
            await self._answer_the_rest(batch)
        return batch

    async def _validate(self, batch: BatchRecord) -> None:
        validation = Validation(batch.endpoint, self._shop.server)

        def work() -> None:
            with self._shop.files.storage.open(batch.input_file_id) as file:
                validation.run(file)

        await asyncio.to_thread(work)
        store, token = self._shop.store, self._shop.token
        if validation.problems:
            await store.fail(token, batch.id, validation.problems)
        else:
            await store.begin(token, batch.id, validation.total)

    async def _run_lines(self, batch: BatchRecord) -> str:
        """Run the lines that have no answer until all have, or there is a reason to stop."""
        window_s = max(0.0, batch.expires_at - time.time())
        work = asyncio.create_task(self._dispatch(batch))
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait(
                (work, stop), timeout=window_s, return_when=asyncio.FIRST_COMPLETED
            )
            if work in done:
                work.result()
                return "completed"
            return "cancelled" if stop in done else "expired"
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.wait([work])
            _ = work.cancelled() or work.exception()  # it was raised above, or came too late
            await self._shop.results.settle()

    async def _dispatch(self, batch: BatchRecord) -> None:
        try:
            async with (
                asyncio.TaskGroup() as group,
                contextlib.aclosing(self._unanswered(batch)) as lines,
            ):
                async for line in lines:
                    await self._shop.server.client.ready()
                    work = await self._prepare(batch, line)
                    weight = 1
                    if isinstance(work, Prepared):
                        weight = sum(request.n for request in work.job.requests)
                    place = await self._shop.gate.enter(weight)
                    task = group.create_task(self._run_line(line, work))
                    # Not the task's own business: one that is cancelled at once never begins.
                    task.add_done_callback(partial(_leave, place))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _unanswered(self, batch: BatchRecord) -> AsyncGenerator[Line, None]:
        with self._shop.files.storage.open(batch.input_file_id) as file:
            lines = raw_lines(file, _ANY_BYTES)
            while page := await asyncio.to_thread(lambda: _page(lines)):
                numbers = page[0].number, page[-1].number
                known = await self._shop.results.answered(batch.id, *numbers)
                for raw in page:
                    if raw.number in known:
                        continue
                    try:
                        yield parse_line(raw, batch.endpoint, _ANY_BYTES)
                    except BadLine as bad:
                        raise AssertionError("the input of a batch has changed") from bad

    async def _prepare(self, batch: BatchRecord, line: Line) -> Prepared | Answer:
        """The work of a line, in the batch class; or its answer if its body is not good."""
        server, prepare = self._shop.server, LINE_KINDS[batch.endpoint]
        rid = line_id(batch.id, line.number)
        try:
            prepared = await offload(line.num_bytes, lambda: prepare(line.body, server, rid))
        except FAILURES as failure:
            return answers.refused(batch.id, line, failure)
        except Exception:
            logs.SERVER.exception("line %d of %s failed in the server", line.number, batch.id)
            return answers.broken(batch.id, line)
        requests = [replace(one, request_class=_BATCH_CLASS) for one in prepared.job.requests]
        ignored = [*line.ignored, *prepared.job.ignored]
        job = replace(prepared.job, requests=requests, ignored=ignored)
        return Prepared(job, prepared.reply)

    async def _run_line(self, line: Line, work: Prepared | Answer) -> None:
        """Answer a line, however often the engine is gone."""
        while not isinstance(work, Answer):
            try:
                work = await self._attempt(line, work)
            except DeadlyRequest as death:
                work = answers.refused(self._id, line, death)
            except EngineDied:
                assert isinstance(work, Prepared), "it was tried"
                await self._shop.server.client.ready(work.job.requests[0].dp_rank)
        await self._shop.results.save(work)
        self._count(work)

    def _count(self, answer: Answer) -> None:
        metrics = self._shop.server.metrics
        metrics.count("batch_requests_total", 1, "failed" if answer.is_error else "completed")
        metrics.count("prompt_tokens_total", answer.input_tokens, "false")
        metrics.count("cached_tokens_total", answer.cached_tokens, "device")
        metrics.count("generation_tokens_total", answer.output_tokens, "false")

    async def _attempt(self, line: Line, prepared: Prepared) -> Answer:
        """The answer of a line; waits while the engine has no room for it.

        Raises:
            EngineDied: the engine was lost on the way.
        """
        server = self._shop.server
        as_object = server.config.batches.batch_choices_object
        while True:
            try:
                body = await whole_answer(server, prepared)
                return answers.answered(
                    self._id, line, prepared.job, body, choices_object=as_object
                )
            except EngineDied:
                raise
            except FAILURES as failure:
                if not _is_passing(failure):
                    return answers.refused(self._id, line, failure)
            except Exception:
                logs.SERVER.exception("line %d of %s failed in the server", line.number, self._id)
                return answers.broken(self._id, line)
            await asyncio.sleep(_BUSY_S)

    async def _answer_the_rest(self, batch: BatchRecord) -> None:
        """Give every line that was not run the reason for it."""
        assert batch.outcome is not None, "a batch is concluded before"
        rest: list[Answer] = []
        async with contextlib.aclosing(self._unanswered(batch)) as lines:
            async for line in lines:
                rest.append(answers.unanswered(batch.id, line, batch.outcome))
                if len(rest) == _REST_LINES:
                    await self._shop.results.save_many(rest)
                    rest = []
        await self._shop.results.save_many(rest)


def _leave(place: Place, _: asyncio.Task[None]) -> None:
    place.leave()


def _page(lines: Iterator[RawLine]) -> list[RawLine]:
    page: list[RawLine] = []
    size = 0
    while len(page) < _PAGE_LINES and size < _PAGE_BYTES and (raw := next(lines, None)):
        page.append(raw)
        size += len(raw.text or b"")
    return page


def _is_passing(failure: Failure) -> bool:
    """Whether the engine may well take the same request later."""
    return getattr(failure, "status", 0) == 503
