"""The store against a naive model: what is kept, in which order it goes, what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.engine.validation import RequestError
from trunkline.server.openai.responses_store import ResponseStore, StoredResponse

IDS = st.integers(0, 7).map("r{}".format)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), IDS, st.none() | IDS, st.integers(0, 3000)),
        st.tuples(st.just("finish"), IDS),
        st.tuples(st.just("get"), IDS),
        st.tuples(st.just("chain"), IDS),
        st.tuples(st.just("delete"), IDS),
    ),
    max_size=60,
)


class Model:
    """The same, as plainly as can be: a list from the least to the most recently used."""

    def __init__(self, store: ResponseStore, limit: int) -> None:
        self.store = store
        self.limit = limit
        self.kept: list[StoredResponse] = []
        self.serial = 0

    def find(self, name: str) -> StoredResponse | None:
        return next((one for one in self.kept if one.id.startswith(f"{name}.")), None)

    def use(self, entry: StoredResponse) -> None:
        self.kept.remove(entry)
        self.kept.append(entry)

    def add(self, name: str, previous: str | None, size: int) -> None:
        if self.find(name) is not None:
            return
        self.serial += 1
        before = None if previous is None else self.find(previous)
        entry = StoredResponse(
            id=f"{name}.{self.serial}",
            previous_id=None if before is None else before.id,
            is_background=False,
            input_items=b'[{"id": "in_%d", "text": "%b"}]' % (self.serial, b"x" * size),
            snapshot=dict,
            abort=lambda: None,
        )
        self.store.add(entry)
        self.kept.append(entry)

    def finish(self, name: str) -> None:
        entry = self.find(name)
        if entry is None or entry.document is not None:
            return
        response: dict[str, Any] = {"id": entry.id, "output": [{"id": f"out_{entry.id}"}]}
        self.store.finish(entry, response)
        assert entry.ended.is_set()
        self.use(entry)
        while sum(one.num_bytes for one in self.kept if one.document is not None) > self.limit:
            self.kept.remove(next(one for one in self.kept if one.document is not None))

    def get(self, name: str) -> None:
        entry = self.find(name)
        if entry is not None:
            assert self.store.get(entry.id) is entry
            self.use(entry)

    def chain(self, name: str) -> None:
        entry = self.find(name)
        entries: list[StoredResponse] = []
        is_whole = entry is not None
        while entry is not None and is_whole:
            is_whole = entry.document is not None
            if is_whole:
                entries.append(entry)
                self.use(entry)
                before = [one for one in self.kept if one.id == entry.previous_id]
                is_whole = bool(before) or entry.previous_id is None
                entry = before[0] if before else None
        found = self.find(name)
        if is_whole and found is not None:
            assert self.store.chain(found.id) == entries[::-1]
        else:
            with pytest.raises(RequestError):
                self.store.chain(found.id if found else name)

    def delete(self, name: str) -> None:
        entry = self.find(name)
        if entry is None:
            with pytest.raises(RequestError) as caught:
                self.store.delete(name)
            assert caught.value.status == 404
            return
        self.store.delete(entry.id)
        self.kept.remove(entry)

    def check(self) -> None:
        ended = [one for one in self.kept if one.document is not None]
        assert list(self.store._entries.values()) == self.kept
        assert self.store._num_bytes == sum(one.num_bytes for one in ended) <= self.limit
        assert set(self.store._items) == {item for one in ended for item in one.item_ids}
        for one in ended:
            assert self.store.item(f"out_{one.id}") == {"id": f"out_{one.id}"}


@given(STEPS, st.sampled_from([1, 3000, 8000, 1 << 20]))
def test_the_store_is_the_naive_one(steps: list[Any], limit: int):
    model = Model(ResponseStore(limit), limit)
    for verb, *arguments in steps:
        getattr(model, verb)(*arguments)
        model.check()
