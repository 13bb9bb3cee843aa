"""Captures: on a stand-in for CUDA, of which only the calls are looked at."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from trunkline.kernels.triton.decode_steps import BucketWork, Computed, DecodeSteps
from trunkline.kernels.triton.graphs import batch_buckets


class Stream:
    def __init__(self, _device: Any = None) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Graph:
    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Calls:
    """What is captured, in which memory and on which stream; where work is launched."""

    def __init__(self) -> None:
        self.current = self.usual = Stream()
        self.captures: list[tuple[Graph, Any, Stream]] = []
        self.launched: list[tuple[str, int, Stream]] = []

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: Any, stream: Stream, **_: Any) -> Iterator[None]:
        self.captures.append((graph, pool, stream))
        with self.stream(stream):
            yield

    def prepare(self, bucket: int) -> BucketWork:
        def forward() -> Computed:
            self.launched.append(("forward", bucket, self.current))
            return Computed(*(torch.full((), float(bucket)) for _ in range(3)))

        def draw() -> dict[str, torch.Tensor]:
            self.launched.append(("draw", bucket, self.current))
            return {"token_ids": torch.full((), bucket)}

        return BucketWork(forward=forward, draw=draw)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    for name, value in (
        ("Stream", Stream),
        ("CUDAGraph", Graph),
        ("stream", made.stream),
        ("graph", made.graph),
        ("current_stream", lambda _device=None: made.current),
        ("graph_pool_handle", object),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_captures_share_memory_and_stream(calls: Calls) -> None:
    """Memory of one stream is not given out on another."""
    steps = DecodeSteps(4, calls.prepare, torch.device("cuda"))
    assert len(calls.captures) == 2 * len(batch_buckets(4))
    assert len({id(pool) for _, pool, _ in calls.captures}) == 1
    (stream,) = {stream for _, _, stream in calls.captures}
    assert stream is not calls.usual
    assert {launched for _, _, launched in calls.launched} == {stream}
    order = [(name, bucket) for name, bucket, _ in calls.launched]
    expected = [(name, b) for b in (4, 2, 1) for name in ("forward",) * 2 + ("draw",) * 2]
    assert order == expected
    # Runs before a capture see what the usual stream has prepared, and are over before it goes on.
    assert stream.waited_for == [calls.usual] * len(calls.captures)
    assert calls.usual.waited_for == [stream] * len(calls.captures)

    count = len(calls.launched)
    assert steps.forward(2).logits == 2
    assert steps.draw(2)["token_ids"] == 2
    assert len(calls.launched) == count
    assert [graph.num_replays for graph, _, _ in calls.captures] == [0, 0, 1, 1, 0, 0]


def test_captured_work_is_let_go(calls: Calls) -> None:
    """It may hold the program that holds the captures: their memory would wait for a collection."""
    made = calls.prepare(1)
    functions = [weakref.ref(made.forward), weakref.ref(made.draw)]
    works = [made]
    del made
    steps = DecodeSteps(1, lambda _: works.pop(), torch.device("cuda"))
    assert [function() for function in functions] == [None, None]
    assert steps.forward(1).logits == 1


def test_buckets() -> None:
    assert batch_buckets(0) == ()
    assert batch_buckets(1) == (1,)
    assert batch_buckets(20) == (1, 2, 4, 8, 10, 12, 14, 16, 20)
