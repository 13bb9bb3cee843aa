"""Files and batches of one app: opened when they are first needed, or when there is work left."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sqlite3
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from trunkline.engine.validation import RequestError
from trunkline.server import logs
from trunkline.server.batches.database import Database
from trunkline.server.batches.files import FileStore
from trunkline.server.batches.storage import Storage
from trunkline.server.batches.store import BatchStore
from trunkline.server.batches.worker import Worker
from trunkline.server.config import BatchOptions
from trunkline.server.http import error_response
from trunkline.server.state import Server, server_of


class Opened(NamedTuple):
    """The parts of an opened storage."""

    database: Database
    files: FileStore
    store: BatchStore
    worker: Worker


class Batches:
    """Opens the storage, lets the worker run, and closes both. Belongs to the app's loop."""

    def __init__(self, server: Server, options: BatchOptions) -> None:
        self._server = server
        self._storage = Storage(storage_path(options.file_storage_path, server.model.name))
        self._is_chosen = options.file_storage_path is not None
        self._lock = asyncio.Lock()
        self._opened: Opened | None = None
        self._is_stopped = False

    async def start(self) -> None:
        """Go on with what is left from before; an empty default place is not made yet.

        Raises:
            RequestError: the storage cannot be used.
        """
        if self._is_chosen or self._storage.state_path.exists():
            await self.opened()

    async def opened(self) -> Opened:
        """The parts.

        Raises:
            RequestError: the storage cannot be used (503).
        """
        async with self._lock:
            if self._opened is None:
                if self._is_stopped:
                    raise RequestError("the server is shutting down.", status=503)
                self._opened = await self._open()
            return self._opened

    async def _open(self) -> Opened:
        try:
            await asyncio.to_thread(self._storage.prepare)
            database = await Database.open(self._storage.state_path)
        except (OSError, sqlite3.Error) as error:
            raise RequestError(
                f"files and batches cannot be stored in {self._storage.root}: {error}; choose "
                "another place with --file-storage-path.",
                status=503,
            ) from error
        files, store = FileStore(database, self._storage), BatchStore(database)
        worker = Worker(self._server, database, store, files)
        worker.start()
        return Opened(database, files, store, worker)

    async def stop(self) -> None:
        """Stop working on batches; files and batches can still be looked at. Idempotent."""
        async with self._lock:
            self._is_stopped = True
            if self._opened is not None:
                await self._opened.worker.stop()

    async def close(self) -> None:
        """Stop, and let go of the storage. Idempotent."""
        await self.stop()
        async with self._lock:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                await opened.database.close()


def storage_path(chosen: str | None, model: str) -> Path:
    """Where files and batches are stored: by default a directory of the user's for each model."""
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2])[:64]
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return Path(base).expanduser().absolute() / "trunkline" / "storage" / f"{name}-{digest}"


async def storage_failure(_: Request, error: Exception) -> Response:
    """The response for what the database could not do: 507 when the disk is full, else 503."""
    logs.SERVER.error("the storage of files and batches failed: %s", error)
    is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    message = f"files and batches cannot be stored now: {error}."
    return error_response(message, 507 if is_full else 503)


async def opened(request: Request) -> Opened:
    """The parts of the app that a request came to.

    Raises:
        RequestError: the storage cannot be used (503).
    """
    return await server_of(request).batches.opened()
