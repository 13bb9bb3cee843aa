"""Responses that can be asked for later: in memory, within a bound, the least recently used go.

Documents are kept as JSON text, so that their size is known. Knows nothing of what is in them but
the ids of items.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from trunkline.engine.validation import RequestError
from trunkline.server.openai.event_log import EventLog

_ENTRY_BYTES: Final = 1024  # what an entry costs besides its text


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """One response: running (then `snapshot` tells how far it is) or ended (then `document`).

    `input_items` is the JSON text of the items that were its own input; `events` are those of a
    stream in the background. `num_bytes` is what it counts for, once it has ended.
    """

    id: str
    previous_id: str | None
    is_background: bool
    input_items: bytes
    snapshot: Callable[[], dict[str, Any]]
    abort: Callable[[], None]
    events: EventLog | None = None
    document: bytes | None = None
    num_bytes: int = 0
    item_ids: tuple[str, ...] = ()
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        if self.document is None:
            return self.snapshot()
        document: dict[str, Any] = orjson.loads(self.document)
        return document

    def inputs(self) -> list[dict[str, Any]]:
        """Its own input items."""
        items: list[dict[str, Any]] = orjson.loads(self.input_items)
        return items

    def end(self, response: dict[str, Any]) -> None:
        """It has ended as `response`; whoever waits is told."""
        self.document = orjson.dumps(response)
        self.item_ids = tuple(item["id"] for item in (*self.inputs(), *response["output"]))
        self.num_bytes = _ENTRY_BYTES + len(self.input_items) + len(self.document)
        if self.events is not None:
            self.num_bytes += self.events.num_bytes + len(self.document)  # one event is to come
        self.ended.set()


class ResponseStore:
    """At most `max_bytes` of ended responses, and all that run; 0 keeps nothing.

    Safe to use from several threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def add(self, entry: StoredResponse) -> None:
        """Keep a response that runs."""
        with self._lock:
            self._entries[entry.id] = entry

    def finish(self, entry: StoredResponse, response: dict[str, Any]) -> None:
        """A response has ended: it counts from now on, and others may have to go."""
        entry.end(response)
        with self._lock:
            if self._entries.get(entry.id) is not entry:
                return
            self._num_bytes += entry.num_bytes
            self._entries.move_to_end(entry.id)
            self._items |= dict.fromkeys(entry.item_ids, entry.id)
            self._evict()

    def get(self, response_id: str) -> StoredResponse:
        """A response; it counts as used.

        Raises:
            RequestError: it is not there, or not any more (404).
        """
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None:
                raise _missing(response_id)
            self._entries.move_to_end(response_id)
            return entry

    def chain(self, response_id: str) -> list[StoredResponse]:
        """A response and those that it builds upon, the oldest first; all count as used.

        Raises:
            RequestError: one of them is not there (any more), or still runs.
        """
        entries: list[StoredResponse] = []
        following: str | None = response_id
        with self._lock:
            while following is not None:
                entry = self._entries.get(following)
                if entry is None:
                    raise _broken(response_id, following)
                if entry.document is None:
                    raise RequestError(
                        f"previous_response_id: the response {following[:80]!r} is still running.",
                        "previous_response_id",
                    )
                self._entries.move_to_end(following)
                entries.append(entry)
                following = entry.previous_id
        return entries[::-1]

    def item(self, item_id: str) -> dict[str, Any] | None:
        """An input or output item of a response that is kept and has ended, by its id."""
        with self._lock:
            entry = self._entries.get(self._items.get(item_id, ""))
        if entry is None:
            return None
        items: Sequence[dict[str, Any]] = (*entry.inputs(), *entry.response()["output"])
        return next((item for item in items if item["id"] == item_id), None)

    def delete(self, response_id: str) -> None:
        """Forget a response; one that runs is aborted.

        Raises:
            RequestError: it is not there (404).
        """
        entry = self.get(response_id)
        with self._lock:
            self._remove(entry)
        if entry.document is None:
            entry.abort()

    def _evict(self) -> None:
        surplus = self._num_bytes - self._max_bytes
        victims = []
        for entry in self._entries.values():
            if surplus <= 0:
                break
            if entry.document is not None:
                victims.append(entry)
                surplus -= entry.num_bytes
        for entry in victims:
            self._remove(entry)

    def _remove(self, entry: StoredResponse) -> None:
        if self._entries.pop(entry.id, None) is None or entry.document is None:
            return
        self._num_bytes -= entry.num_bytes
        for item_id in entry.item_ids:
            if self._items.get(item_id) == entry.id:
                del self._items[item_id]


def _missing(response_id: str) -> RequestError:
    return RequestError(
        f"There is no response {response_id[:80]!r}: it was not stored, was deleted, or made room "
        "for others (--response-store-bytes).",
        "response_id",
        status=404,
    )


def _broken(response_id: str, missing_id: str) -> RequestError:
    words = "" if response_id == missing_id else f" builds upon {missing_id[:80]!r}, which"
    return RequestError(
        f"previous_response_id {response_id[:80]!r}{words} is not stored (any more); send the "
        "conversation as input items instead.",
        "previous_response_id",
        code="previous_response_not_found",
    )
