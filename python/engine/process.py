"""The engine in a child process: `python -m trunkline.engine.process`, started and supervised here.

Parent and child share three things. The *lifeline* is the child's standard input: its first line is
the boot record, and when it closes (also because the parent was killed) the child exits. The
*status pipe* carries the child's `ready` or `failed`; its end is the child's death. The *directory*
holds the socket of the channel and two files that the parent reads without asking: the heartbeat,
and the requests that were run (`entries.py`). The child starts anew, with the next boot epoch,
whenever it dies after having been ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from trunkline.engine import log_lines
from trunkline.engine.channel import Changed, Deliver, Port, SocketLink, SocketPort
from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.config import EngineConfig
from trunkline.engine.entries import Begun, EntryWriter, read_entries
from trunkline.engine.loop import EngineLoop, Entered
from trunkline.engine.messages import EngineFacts, EngineStatus
from trunkline.engine.runtime_directory import RuntimeDirectory
from trunkline.engine.shares import Share

logger = logging.getLogger(__name__)

HEARTBEAT: Final = "heartbeat"  # the name of its file
CPU_THREADS: Final = "TRUNKLINE_CPU_THREADS"  # `kernels/cpu/backend.py` reads it
CLIENT: Final = 1  # the supervisor's number at the engine's socket; others have higher ones
STOP_GRACE_S: Final = 3.0  # a child whose lifeline has closed may finish its step for so long
MAX_PARENT_CHARS: Final = 64  # of the 107 that a socket's path may have
BACKOFF_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
STABLE_S: Final = 60.0  # an engine that lived this long starts the back-off anew


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the child's standard input."""

    config: EngineConfig
    share: Share
    epoch: int
    directory: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the status pipe: `facts` when ready, `error` when the start has failed."""

    facts: EngineFacts | None = None
    error: str | None = None


class Launched(Protocol):
    """An engine that can be run, `launch.LaunchedEngine`."""

    @property
    def facts(self) -> EngineFacts:
        """What is told to the parent."""

    def loop(
        self, port: Port, beat: Callable[[], None], entered: Entered | None = None
    ) -> EngineLoop:
        """Join it to a port; `beat` and `entered` are as in `LoopOptions`."""


class Heartbeat:
    """When the loop last went round (monotonic seconds), in a file that both sides map."""

    SIZE: Final = 8

    def __init__(self, path: Path) -> None:
        """Map the file; create it, saying "never", where it does not exist."""
        with contextlib.suppress(FileExistsError), path.open("xb") as file:
            file.write(bytes(self.SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.SIZE)

    def beat(self) -> None:
        """The loop goes round."""
        struct.pack_into("d", self._map, 0, time.monotonic())

    def clear(self) -> None:
        """Say "never" again."""
        struct.pack_into("d", self._map, 0, 0.0)

    def age_s(self) -> float | None:
        """Seconds since the last beat; None if there was none."""
        (beat_at,) = struct.unpack_from("d", self._map, 0)
        return time.monotonic() - beat_at if beat_at else None


class EngineProcess:
    """Starts and supervises an engine process; the `Channel` of the client that owns it.

    A start that fails is final: the status is `dead` and says why. An engine that dies later is
    started again, after a pause that grows while it keeps dying; one whose heart has not beaten for
    `watchdog_timeout` is killed first. Needs no signal handler and no child watcher.
    """

    def __init__(
        self,
        config: EngineConfig,
        module: str = "trunkline.engine.process",
        share: Share = Share(),  # noqa: B008 (it is frozen)
    ) -> None:
        """Prepare.

        Args:
            config: the settings.
            module: what the child runs (it must call `run_child`).
            share: which of several engines it is, and what it may take.
        """
        self._config = config
        self._share = share
        self._name = f"engine {share.rank}" if share.count > 1 else "engine"
        self._module = module
        self._epoch = 0
        self._status = EngineStatus(state="starting", epoch=0)
        self._directory: RuntimeDirectory | None = None
        self._heartbeat: Heartbeat | None = None
        self._link: SocketLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._stuck = ""  # why the watchdog has killed the running child
        self._changed: Changed = _nobody
        self._watchers: list[Changed] = []

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        """See `Channel`."""
        self._changed = changed
        self._directory = RuntimeDirectory(socket_parent())
        self._heartbeat = Heartbeat(self._directory.path / HEARTBEAT)
        self._link = SocketLink(socket_path(self._directory.path), CLIENT, deliver)
        self._task = asyncio.create_task(self._supervise())

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        """See `Channel`."""
        assert self._link is not None, "open comes first"
        self._link.send(kind, epoch, payload)

    def status(self) -> EngineStatus:
        """See `Channel`."""
        age = self._heartbeat.age_s() if self._heartbeat else None
        return msgspec.structs.replace(self._status, heartbeat_age_s=age)

    def entered(self, epoch: int) -> Begun | None:
        """See `Channel`."""
        if self._directory is None:
            return None
        return read_entries(entries_path(self._directory.path), CLIENT, epoch)

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """How the last child ended; None while it runs."""
        return self._process.returncode if self._process else None

    @property
    def directory(self) -> Path | None:
        """Where socket and heartbeat are."""
        return self._directory.path if self._directory else None

    def watch(self, changed: Changed) -> None:
        """Have `changed` called too whenever the status has changed, after the client's own.

        To be called before the engine is ready. The watcher lets other clients to it, so it is for
        suspects alone until `open_to_all`.
        """
        self._watchers.append(changed)

    def open_to_all(self, epoch: int) -> None:
        """Let in more than suspects, if this is still the engine's life."""
        if self._status.access == "suspects" and self._status.epoch == epoch:
            self._status = msgspec.structs.replace(self._status, access="shared")
            self._tell()

    async def close(self) -> None:
        """See `Channel`: the child has exited when this returns."""
        self._closing = True
        if self._process is not None:
            await self._end(self._process)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._link is not None:
            self._link.close()
        if self._directory is not None:
            self._directory.close()
        self._set_status("dead", error="the engine was shut down")

    async def _supervise(self) -> None:
        try:
            await self._live()
        except Exception as error:
            logger.exception("The supervision of the engine has failed")
            self._set_status("dead", error=f"the engine cannot be supervised: {error}")

    async def _live(self) -> None:
        """Run one child after another until `close`, or until one could not start."""
        failures = 0
        while True:
            started_at = time.monotonic()
            error = await self._live_once()
            if self._closing:
                return
            if self._status.state != "ready" and failures == 0:
                self._set_status("dead", error=error)
                return
            failures = 1 if time.monotonic() - started_at > STABLE_S else failures + 1
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
            logger.error("%s; starting %s again in %.0f s", error, self._name, pause_s)
            self._set_status("starting", error=error)
            await asyncio.sleep(pause_s)

    async def _live_once(self) -> str:
        """Run one child from start to death; what it died of."""
        assert self._directory is not None
        assert self._heartbeat is not None
        self._epoch += 1
        self._heartbeat.clear()
        self._stuck = ""
        read_end, write_end = os.pipe()
        try:
            process = self._process = _spawn(self._module, write_end, self._share)
        finally:
            os.close(write_end)
        boot = Boot(
            config=self._config,
            share=self._share,
            epoch=self._epoch,
            directory=str(self._directory.path),
        )
        self._set_status("starting", error=self._status.error)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the pipe's end tells
            process.stdin.write(msgspec.json.encode(boot) + b"\n")
            process.stdin.flush()
        watchdog = asyncio.create_task(self._watch(process))
        try:
            error = await self._follow(read_end)
        finally:
            watchdog.cancel()
        await self._end(process)
        cause = self._stuck or f"The engine process {_cause_of_death(process.returncode)}"
        return error or cause

    async def _follow(self, read_end: int) -> str | None:
        """Take the child's reports until its death; the error it reported, if any."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 24)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        error = None
        try:
            while line := await reader.readline():
                report = msgspec.json.decode(line, type=Report)
                error = report.error
                if report.facts is not None:
                    self._set_status("ready", facts=report.facts)
        finally:
            transport.close()
        return error

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a child whose loop does not go round any more, with a dump of its stacks."""
        limit_s = self._config.scheduler.watchdog_timeout
        while True:
            await asyncio.sleep(min(max(limit_s / 10, 0.1), 10.0))
            age_s = self.status().heartbeat_age_s
            if self._status.state == "ready" and age_s is not None and age_s > limit_s:
                self._stuck = f"The engine's loop had not moved for {age_s:.0f} s and was killed"
                logger.error("The engine's loop has not moved for %.0f s: killing it", age_s)
                process.send_signal(signal.SIGABRT)
                await asyncio.sleep(STOP_GRACE_S)
                process.kill()

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Let go of a child: close its lifeline, wait, kill it if it does not go."""
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        deadline = time.monotonic() + STOP_GRACE_S + 2.0
        pause_s = 0.001
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _set_status(
        self,
        state: Literal["starting", "ready", "dead"],
        *,
        facts: EngineFacts | None = None,
        error: str | None = None,
    ) -> None:
        self._status = EngineStatus(
            state=state,
            epoch=self._epoch,
            facts=facts or self._status.facts,
            error=error,
            access="suspects" if state == "ready" and self._watchers else "exclusive",
        )
        self._tell()

    def _tell(self) -> None:
        for changed in (self._changed, *self._watchers):
            changed()


def child_environment() -> dict[str, str]:
    """The environment in which a child finds this very package."""
    environment = dict(os.environ)
    package_root = str(Path(__file__).parents[2])
    if package_root not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        known = [path for path in (environment.get("PYTHONPATH"),) if path]
        environment["PYTHONPATH"] = os.pathsep.join((package_root, *known))
    return environment


def _spawn(module: str, status_pipe: int, share: Share) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own: a terminal's Ctrl-C is its parent's to handle."""
    environment = child_environment()
    # Threads that spin for work starve each other when anything else needs a core, the HTTP process
    # for one: a step then takes ten times as long. Read when torch loads.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if share.threads is not None:
        for variable in (CPU_THREADS, "OMP_NUM_THREADS"):
            environment.setdefault(variable, str(share.threads))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(status_pipe)],
        stdin=subprocess.PIPE,
        pass_fds=(status_pipe,),
        env=environment,
        start_new_session=True,
    )


def _cause_of_death(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _nobody() -> None:
    """Stands in until a client has opened the channel."""


def socket_parent() -> str | None:
    """Where a directory for sockets goes: their paths have to be short."""
    return None if len(tempfile.gettempdir()) < MAX_PARENT_CHARS else "/tmp"


def socket_path(directory: Path) -> str:
    """Where the channel's socket is."""
    return str(directory / "engine")


def entries_path(directory: Path) -> Path:
    """Where it is written down which requests were run."""
    return directory / "entries"


class _Lifeline:
    """Ends this process when standard input closes: its supervisor is gone or wants it gone."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._loop: EngineLoop | None = None
        threading.Thread(target=self._wait, name="lifeline", daemon=True).start()

    def guard(self, loop: EngineLoop) -> None:
        """From now on the loop is asked to stop first."""
        self._loop = loop

    def _wait(self) -> None:
        while os.read(0, 4096):
            continue
        if self._loop is not None:
            self._loop.stop()
            time.sleep(STOP_GRACE_S)
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


def run_child(build: Callable[[EngineConfig, Share], Launched]) -> None:
    """Be the child: build an engine as the boot record says, and serve until the lifeline closes.

    Exits with code 1 when the engine cannot be built, after reporting why.
    """
    status_pipe = int(sys.argv[1])
    os.set_inheritable(status_pipe, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The supervisor drains and then closes the lifeline, so that no request is cut off here.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    boot = msgspec.json.decode(_read_line(0), type=Boot)
    lifeline = _Lifeline(boot.directory)
    share = boot.share
    configure_logging(boot.config.log_level, f"DP{share.rank}" if share.count > 1 else "")
    heartbeat = Heartbeat(Path(boot.directory) / HEARTBEAT)
    try:
        engine = build(boot.config, share)
    except Exception as error:
        if isinstance(
            error, CheckpointError | ValueError
        ):  # a model or setting as it should not be
            cause = str(error)
        else:
            logger.exception("The engine could not start")
            cause = f"{type(error).__name__}: {error}"
        _report(status_pipe, Report(error=f"The engine could not start: {cause}"))
        sys.exit(1)
    port = SocketPort(socket_path(Path(boot.directory)), boot.epoch)
    entries = EntryWriter(entries_path(Path(boot.directory)), boot.epoch)
    loop = engine.loop(port, heartbeat.beat, entries.add)
    lifeline.guard(loop)
    heartbeat.beat()
    _report(status_pipe, Report(facts=engine.facts))
    loop.run()
    port.close()
    entries.close()
    shutil.rmtree(boot.directory, ignore_errors=True)


def configure_logging(level: str, tag: str = "") -> None:
    """Write the log of an engine process to standard error, libraries' lines too."""
    root = logging.getLogger()
    root.handlers[:] = [log_lines.handler(tag)]
    root.setLevel(level.upper())


def _read_line(descriptor: int) -> bytes:
    """Read up to a newline, unbuffered: what follows belongs to the lifeline."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(descriptor, 1)
        if not chunk:
            sys.exit(0)
        line += chunk
    return bytes(line)


def _report(status_pipe: int, report: Report) -> None:
    with contextlib.suppress(BrokenPipeError):  # the lifeline ends this process
        os.write(status_pipe, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    from trunkline.engine.launch import build  # the parent does without models and devices

    run_child(lambda config, share: build(config, share=share, own_process=True))
