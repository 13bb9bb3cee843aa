"""The life of the server process: listen, load, warm up, serve, drain, exit.

HTTP listens from the first moment and answers 503 until the model is loaded, so that probes see the
truth. Knows signals and the order of things; nothing of endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.engine.checkpoint import Checkpoint
from trunkline.engine.client import Client
from trunkline.engine.fleet import Fleet, balance_method
from trunkline.engine.process import EngineProcess
from trunkline.engine.shares import equal_shares, replica_config
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.default_model import DEFAULT_MODEL
from trunkline.server import logs
from trunkline.server.api_workers.pool import ApiWorkers, WorkerFailed
from trunkline.server.api_workers.relay import Relayed
from trunkline.server.app import create_app
from trunkline.server.config import HttpOptions, ServerConfig
from trunkline.server.connections import BACKLOG, listen
from trunkline.server.http import error_response
from trunkline.server.middleware import OWN_REQUEST
from trunkline.server.state import ServedModel, Server
from trunkline.server.tls import TlsError, is_password_needless, server_context

Value = TypeVar("Value")

WARMUP_TEXT: Final = "The capital city of France is"
WARMUP_TOKENS: Final = 8
INTERRUPTED: Final = 130  # exit code of a process that a second Ctrl-C ended
_DESCRIPTORS: Final = 65536
_HANGUP_S: Final = 1.0  # what is cut off at the end of the grace time has this long to say so


class StartupError(Exception):
    """The server cannot start; the message says why."""


class Gate:
    """The application, or 503 while there is none yet."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            logs.access(scope, 503)
            await error_response("the model is being loaded", 503)(scope, receive, send)


def bind(options: HttpOptions) -> socket.socket:
    """Take the address, so that a busy port is an error before the model is loaded.

    Raises:
        StartupError: the address cannot be had.
    """
    listener = _tcp_socket(options.host)
    _take_address(listener, options.host, options.port)
    listener.setblocking(False)
    return listener


def _take_address(listener: socket.socket, host: str, port: int) -> None:
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = "; choose another with --port" if why == os.strerror(errno.EADDRINUSE) else ""
        raise StartupError(f"cannot listen on {host} port {port}: {why}{remedy}") from error


def bind_all(options: HttpOptions) -> list[socket.socket]:
    """A listening socket for each HTTP process; the kernel deals connections out among them.

    Raises:
        StartupError: the address cannot be had.
    """
    first = bind(options)
    if options.api_workers == 1:
        return [first]
    port = first.getsockname()[1]
    first.close()  # only sockets that all are made to share can have one port
    listeners = []
    for _ in range(options.api_workers):
        listener = _tcp_socket(options.host)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _take_address(listener, options.host, port)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        listeners.append(listener)
    return listeners


def _tcp_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it: a small write never waits for the peer's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """The event loop of HTTP processes."""
    try:
        import uvloop
    except ImportError:  # not there on Windows
        return None
    return uvloop.Loop


def allow_connections() -> None:
    """Let the process have as many descriptors as it may: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Signals:
    """SIGTERM and SIGINT ask to stop; a second SIGINT ends the process at once."""

    def __init__(self, processes: Sequence[EngineProcess], workers: ApiWorkers | None) -> None:
        self.stopping = asyncio.Event()
        self._processes = processes
        self._workers = workers
        self._interrupts = 0
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            if self._workers is not None:
                self._workers.kill()
            for process in self._processes:
                if process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                if process.directory is not None:
                    shutil.rmtree(process.directory, ignore_errors=True)
            os._exit(INTERRUPTED)
        self.stopping.set()

    async def unless_stopped(self, work: Awaitable[Value]) -> Value | None:
        """The result of `work`; None, and `work` cancelled, if a signal comes first."""
        return await unless_set(self.stopping, work)


async def unless_set(event: asyncio.Event, work: Awaitable[Value]) -> Value | None:
    """The result of `work`; None, and `work` cancelled, if the event is set first."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(event.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


async def run(config: ServerConfig, module: str = "trunkline.engine.process") -> None:
    """Serve until a signal asks to stop; nothing is left behind.

    Args:
        config: all settings.
        module: what an engine's process runs.

    Raises:
        StartupError: the address cannot be had, or the TLS files cannot be used.
        CheckpointError: the model cannot be opened.
        EngineDied: the engine could not start.
        RequestError: the default sampling parameters are not valid, or the storage of files and
            batches cannot be used.
    """
    allow_connections()
    try:
        tls = server_context(config.http)
    except TlsError as error:
        raise StartupError(str(error)) from error
    if is_password_needless(config.http):
        logs.SERVER.warning("ssl_keyfile_password has no effect: the private key is not encrypted")
    listeners = bind_all(config.http)
    gate, stop_http = Gate(), asyncio.Event()
    http = [asyncio.create_task(listen(gate, listeners[0], config.http, stop_http, tls))]
    logs.SERVER.info("INFO:     Started server process [%d]", os.getpid())
    engine = replica_config(config.engine)
    shares = equal_shares(config.engine.parallel.dp_size)
    processes = [EngineProcess(engine, module, share) for share in shares]
    client = Client(processes[0]) if len(processes) == 1 else _fleet(config, processes)
    await client.start()
    workers = ApiWorkers(config, processes, client, listeners[1:]) if listeners[1:] else None
    if workers is not None:
        relayed = listen(Relayed(gate), workers.relay, config.http, stop_http)
        http.append(asyncio.create_task(relayed))
        workers.start()
    signals = Signals(processes, workers)
    server: Server | None = None
    try:
        server = await signals.unless_stopped(_open_gate(config, client, gate, workers))
        if server is not None:
            _say_where(config, listeners[0])
            await signals.unless_stopped(_warm_up(server, gate))
        if server is not None and not signals.stopping.is_set():
            await server.batches.start()
            server.starting = False
            if workers is not None:
                workers.serve(server.metrics)
            logs.SERVER.info("The server is fired up and ready to roll!")
            await signals.stopping.wait()
        if server is not None:
            closing = workers.close(config.http.shutdown_grace_s) if workers else _nothing()
            await asyncio.gather(drain(server, client), closing)
    finally:
        if workers is not None:
            await workers.close()
        await client.close()
        stop_http.set()
        await asyncio.gather(*http)
        if server is not None:
            await server.batches.close()


async def _nothing() -> None:
    pass


def _say_where(config: ServerConfig, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    scheme = "http" if config.http.ssl_certfile is None else "https"
    logs.SERVER.info(
        "INFO:     Listening on %s://%s:%d (Press CTRL+C to quit)", scheme, where, port
    )


async def _open_gate(
    config: ServerConfig, client: Client | Fleet, gate: Gate, workers: ApiWorkers | None
) -> Server:
    app = await load(config, client)
    server: Server = app.state.server
    if workers is not None:
        server.api_workers = workers
        try:
            await workers.loaded()
        except WorkerFailed as error:
            raise StartupError(str(error)) from error
    gate.app = app
    return server


def _fleet(config: ServerConfig, processes: Sequence[EngineProcess]) -> Fleet:
    is_shared = config.http.api_workers > 1
    return Fleet(processes, balance_method(config.engine), is_shared=is_shared)


async def load(config: ServerConfig, client: Client | Fleet) -> Starlette:
    """Read what HTTP needs of the model while the engine loads; the application, `starting`."""
    checkpoint, model = await asyncio.to_thread(_open, config)
    await client.ready()
    facts = client.status.facts
    assert facts is not None, "a ready engine has facts"
    options = config.engine.model
    app = create_app(
        client,
        checkpoint.tokenizer,
        checkpoint.chat_template,
        config,
        ServedModel(
            name=options.served_model_name or options.model_path or DEFAULT_MODEL.name,
            path=checkpoint.source,
            tokenizer_path=options.tokenizer_path or checkpoint.source,
            model_type=checkpoint.config.model_type,
            architecture=checkpoint.config.architecture,
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            hidden_size=checkpoint.config.hidden_size,
        ),
        model,
    )
    app.state.server.starting = True
    return app


def _open(config: ServerConfig) -> tuple[Checkpoint, dict[str, float | int]]:
    """The checkpoint with its slow parts read, and its recommended sampling parameters."""
    checkpoint = open_checkpoint(config.engine.model)
    _ = checkpoint.tokenizer, checkpoint.chat_template
    return checkpoint, checkpoint.generation.sampling


async def _warm_up(server: Server, app: ASGIApp) -> None:
    """Send the application its first requests, as a client would.

    Raises:
        StartupError: one of them failed.
    """
    if server.config.http.skip_server_warmup:
        return
    body = {
        "text": WARMUP_TEXT,
        "sampling_params": {"temperature": 0, "max_new_tokens": WARMUP_TOKENS},
    }
    requests = [("GET", "/model_info", b"")]
    for rank in range(server.native.dp_size):
        content = json.dumps({**body, "routed_dp_rank": rank}).encode()
        requests.append(("POST", "/generate", content))
    for method, path, content in requests:
        status = await _request(app, method, path, content)
        if status != 200:
            raise StartupError(f"the warm-up request {method} {path} was answered with {status}")


async def _request(app: ASGIApp, method: str, path: str, body: bytes) -> int:
    """Make one request of an application, past the keys; the status of its answer."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        OWN_REQUEST: True,
    }
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError("never")

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope, receive, send)
    return status


async def drain(server: Server, client: Client | Fleet) -> None:
    """Refuse new work and let what is in flight end; what outlives the grace time is failed."""
    server.draining = True
    await server.batches.stop()
    grace_s = server.config.http.shutdown_grace_s
    logs.SERVER.info("Shutting down: %d requests in flight", server.in_flight)
    try:
        await asyncio.wait_for(server.idle.wait(), grace_s)
    except TimeoutError:
        logs.SERVER.warning(
            "%d requests did not end within %g s and are cut off", server.in_flight, grace_s
        )
        await client.close("the server is shutting down")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.idle.wait(), _HANGUP_S)
