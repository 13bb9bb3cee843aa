"""Requests with a grammar: held back while it compiles, refused if it does not, remembered after.

It works for the engine's loop, in the loop's thread, and never waits. It knows requests by the id
that the core gave them; slots, steps and masks are those of `masks.py`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from trunkline.engine.grammar.backend import Compiled
from trunkline.engine.grammar.compilers import Compiler, Finished
from trunkline.engine.messages import GrammarSpec, Submit

CACHE_BYTES: Final = 256 << 20

Key = tuple[str, str]  # kind and text


class HoldingCore(Protocol):
    """What is needed of the core."""

    def ready(self, request: int, error: str | None = None, *, is_fault: bool = False) -> None: ...
    def is_live(self, request: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request's outputs must match, and after which ids that begins."""

    compiled: Compiled
    starts_after: tuple[int, ...] = ()


class GrammarCache:
    """Compiled grammars, the least recently used dropped first."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[Key, Compiled] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: Key) -> Compiled | None:
        """The grammar, if it is here."""
        found = self._grammars.get(key)
        if found is not None:
            self._grammars.move_to_end(key)
        return found

    def put(self, key: Key, compiled: Compiled) -> None:
        """Keep a grammar that is not here, unless it is larger than the whole cache."""
        if self._size(key, compiled) > self._max_bytes or key in self._grammars:
            return
        self._grammars[key] = compiled
        self.num_bytes += self._size(key, compiled)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._size(*self._grammars.popitem(last=False))

    def _size(self, key: Key, compiled: Compiled) -> int:
        return compiled.num_bytes + 4 * len(key[1])


@dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, and who waits for it."""

    spec: GrammarSpec
    key: int
    requests: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


class Constraints:
    """Gets grammars compiled, once each, for the requests that the core holds back."""

    def __init__(self, core: HoldingCore, compiler: Compiler, cache: GrammarCache) -> None:
        self._core = core
        self._compiler = compiler
        self._cache = cache
        self._keys = itertools.count(1)
        self._jobs: dict[Key, _Job] = {}
        self._by_number: dict[int, Key] = {}
        self._constraints: dict[int, Constraint] = {}
        self._hits = 0
        self._misses = 0
        self._failures = 0
        self._compile_seconds = 0.0

    def prepare(self, request: int, message: bytes) -> None:
        """Get a request's grammar; the core is told, now or from `poll`, when it is there."""
        spec = msgspec.msgpack.decode(message, type=Submit).grammar
        if spec is None:  # held back without a reason
            self._core.ready(request)
            return
        self._forget_ended(self._constraints)
        key = (spec.kind, spec.text)
        compiled = self._cache.get(key)
        if compiled is not None:
            self._hits += 1
            self._release(request, compiled, tuple(spec.starts_after))
            return
        job = self._jobs.get(key)
        if job is None:
            self._misses += 1
            job = self._jobs[key] = _Job(spec, next(self._keys))
            self._by_number[job.key] = key
            self._compiler.submit(job.key, spec)
        else:
            self._hits += 1
        job.requests.append((request, tuple(spec.starts_after)))

    def poll(self) -> None:
        """Release or refuse the requests whose grammar is decided; drop what nobody waits for."""
        for finished in self._compiler.finished():
            self._settle(finished)
        for job in list(self._jobs.values()):
            job.requests = [one for one in job.requests if self._core.is_live(one[0])]
            if not job.requests:
                self._compiler.cancel(job.key)
                self._drop(job.key)

    def close(self) -> None:
        """End the compiler."""
        self._compiler.close()

    def of(self, request: int) -> Constraint:
        """The constraint of a request that was released and has not ended."""
        return self._constraints[request]

    def ended(self, requests: Iterable[int]) -> None:
        """Some of these may have ended: forget those that have."""
        self._forget_ended(requests)

    def stats(self) -> dict[str, float]:
        """Gauges and cumulative counters by name."""
        return {
            "grammar_queue": sum(len(job.requests) for job in self._jobs.values()),
            "grammar_cache_bytes": self._cache.num_bytes,
            "grammar_cache_hits_total": self._hits,
            "grammar_cache_misses_total": self._misses,
            "grammar_failures_total": self._failures,
            "grammar_compile_seconds_total": self._compile_seconds,
        }

    def _settle(self, finished: Finished) -> None:
        self._compile_seconds += finished.seconds
        job = self._drop(finished.key)
        if job is None:
            return  # cancelled in the meantime
        if finished.compiled is None:
            self._failures += 1
            message = f"Failed to compile {job.spec.kind} grammar: {finished.error}"
            for request, _ in job.requests:
                self._core.ready(request, message, is_fault=finished.is_fault)
            return
        self._cache.put((job.spec.kind, job.spec.text), finished.compiled)
        for request, starts_after in job.requests:
            self._release(request, finished.compiled, starts_after)

    def _release(self, request: int, compiled: Compiled, starts_after: tuple[int, ...]) -> None:
        self._constraints[request] = Constraint(compiled, starts_after)
        self._core.ready(request)

    def _drop(self, number: int) -> _Job | None:
        key = self._by_number.pop(number, None)
        return None if key is None else self._jobs.pop(key)

    def _forget_ended(self, requests: Iterable[int]) -> None:
        for request in list(requests):
            if not self._core.is_live(request):
                self._constraints.pop(request, None)


class NoConstraints:
    """Stands in for `Constraints` where there is no grammar backend: every grammar is refused."""

    def __init__(self, core: HoldingCore, reason: str) -> None:
        self._core = core
        self._reason = reason

    def prepare(self, request: int, message: bytes) -> None:
        """Refuse the request."""
        spec = msgspec.msgpack.decode(message, type=Submit).grammar
        kind = "the" if spec is None else spec.kind
        self._core.ready(request, f"Failed to compile {kind} grammar: {self._reason}")

    def poll(self) -> None:
        """Nothing waits."""

    def stats(self) -> dict[str, float]:
        """No figures."""
        return {}

    def close(self) -> None:
        """Nothing is open."""
