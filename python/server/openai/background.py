"""Responses that no HTTP request waits for."""

from __future__ import annotations

import asyncio

from trunkline.engine.client import Stream
from trunkline.engine.validation import RequestError
from trunkline.server import logs
from trunkline.server.answer import Job, raise_failed
from trunkline.server.errors import FAILURES
from trunkline.server.meter import Meter
from trunkline.server.openai.responses_reply import ResponseReply
from trunkline.server.request_log import RequestLog
from trunkline.server.state import Server


async def start(server: Server, job: Job, reply: ResponseReply) -> dict[str, object]:
    """Submit a job and leave it running; the response object as it is once the engine has it.

    While it runs it counts as in flight, so that a server that shuts down gives it its time.

    Raises:
        Failure: the engine refused it or is not there.
    """
    [request] = job.requests
    log = RequestLog(server)
    log.received(job.requests)
    stream = server.client.submit(request)
    try:
        await stream.accepted()
    except BaseException:
        stream.abort()
        raise
    reply.keep_running([stream])
    task = asyncio.create_task(_run(server, job, stream, reply, log))
    server.background.add(task)
    task.add_done_callback(server.background.discard)
    return reply.snapshot()


async def _run(
    server: Server, job: Job, stream: Stream, reply: ResponseReply, log: RequestLog
) -> None:
    meter = Meter(server.metrics, [stream], job.stream)
    meter.accepted = True
    try:
        with server.running(job.rid, [stream.request.rid]):
            await stream.finished()
            for sample in stream.samples:
                meter.seen(stream, sample, len(sample.output_ids))
            raise_failed(stream.samples)
            reply.whole([stream])
    except FAILURES as failure:
        reply.fail(failure)
    except Exception:
        logs.SERVER.exception("a background response failed in the server")
        reply.fail(RequestError("the server failed; its log says why", status=500))
    finally:
        stream.abort()
        reply.leave()
        meter.close()
        log.finished([stream])
