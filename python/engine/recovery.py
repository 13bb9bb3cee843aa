"""Which requests go to a restarted engine, and when.

A death of the engine counts against a request that gained no token since it was last submitted. A
request with `MAX_DEATHS` of them in a row is a suspect: it is tried alone, until it has gained a
token, while everything else is held back. It is given up only if the engine dies while it is alone.
So a request that kills engines cannot take others with it, and none is failed for another's fault.
Where several processes submit to one engine, all try their suspects, one after another, before any
submits more (`EngineStatus.access`).

What the engine had not begun to run has hardly killed it, and a long queue is not tried one by one:
such deaths are counted apart, and `MAX_IDLE_DEATHS` of them make a suspect. They are not counted
apart where nothing had been begun in that life of the engine, by any client: then one of those that
waited may well have done it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trunkline.engine.entries import Begun
from trunkline.engine.messages import Access
from trunkline.engine.stream import Stream

MAX_DEATHS: Final = 2
MAX_IDLE_DEATHS: Final = 8


def is_suspect(stream: Stream) -> bool:
    """Whether a request is to be tried alone."""
    return stream.deaths >= MAX_DEATHS or stream.idle_deaths >= MAX_IDLE_DEATHS


def _absolve(stream: Stream) -> None:
    stream.deaths = stream.idle_deaths = 0


class Recovery:
    """The requests that no engine has now, and the suspect that one has for itself."""

    def __init__(self) -> None:
        self._held: list[Stream] = []  # in the order of their arrival
        self._alone: Stream | None = None

    @property
    def held(self) -> list[Stream]:
        """Requests that wait to be submitted."""
        return list(self._held)

    @property
    def suspect(self) -> Stream | None:
        """The request that runs alone: nothing else may be submitted."""
        return self._alone

    def engine_died(
        self, in_flight: Iterable[Stream], entered: Begun | None = None
    ) -> Stream | None:
        """Take what was in flight.

        Args:
            in_flight: requests in the order of their arrival.
            entered: what the engine had begun to run; None: it may have been any.

        Returns:
            The request to give up, if any.
        """
        guilty = None
        survivors = []
        in_flight = list(in_flight)
        if entered is not None and not entered.others:
            begun = any(stream.key in entered.keys for stream in in_flight)
            entered = entered if begun else None
        for stream in in_flight:
            if stream.has_gained:
                _absolve(stream)
            elif entered is None or stream.key in entered.keys:
                stream.deaths += 1
            else:
                stream.idle_deaths += 1
            if stream is self._alone and not stream.has_gained:
                guilty = stream
            else:
                survivors.append(stream)
        self._alone = None
        self._held[:0] = survivors
        return guilty

    def hold(self, stream: Stream) -> None:
        """Keep a request until there is an engine for it."""
        self._held.append(stream)

    def drop(self, stream: Stream) -> bool:
        """Forget a held request; False if it is not held."""
        if stream not in self._held:
            return False
        self._held.remove(stream)
        return True

    def due(self, access: Access = "exclusive") -> list[Stream]:
        """The requests to submit now to an engine that has nothing else of this client's.

        Args:
            access: what it may be given; where others share it, a trial would tell nothing.
        """
        if self._alone is not None:
            return []
        suspect = next(filter(is_suspect, self._held), None)
        if suspect is not None and access != "shared":
            self._alone = suspect
            self._held.remove(suspect)
            return [suspect]
        if access == "suspects":
            return []
        due, self._held = self._held, []
        return due

    def is_cleared(self, stream: Stream) -> bool:
        """Whether a request that runs alone has shown that it can gain a token."""
        return stream is self._alone and stream.has_gained

    def others_joined(self) -> None:
        """The suspect is not alone any more: should the engine die, it may be another's fault."""
        self._alone = None

    def test_ended(self, stream: Stream, finished: bool) -> None:
        """The suspect has left the engine; unless it has finished, it waits with the others now."""
        assert stream is self._alone, "only the suspect is tested"
        self._alone = None
        _absolve(stream)
        if not finished:
            self._held.insert(0, stream)
