"""A scheduler and a runner without a model: what the loop and the client are tested with.

The fake scheduler runs every accepted request in every step, one token each; the fake runner says
what the token is: one more than the slot's last.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec
import numpy as np

from trunkline.engine import messages
from trunkline.engine.channel import LocalHub
from trunkline.engine.loop import EngineLoop, LoopOptions
from trunkline.engine.messages import EngineFacts
from trunkline.kernels import Finished
from trunkline.plan import (
    PLAN_HEADER_BYTES,
    PLAN_MAGIC,
    PLAN_SECTIONS,
    RESULT_SECTIONS,
    SECTION_TABLE_WORD,
    VERSION,
    Plan,
    encode_result,
)

FACTS = EngineFacts(
    pid=0,
    model_path="fake",
    dtype="float32",
    device="cpu",
    weight_version="default",
    vocab_size=1000,
    page_size=16,
    context_length=512,
    max_total_tokens=1024,
    max_running_requests=64,
    max_batch_tokens=256,
    chunked_prefill_size=None,
    weight_bytes=0,
    kv_cache_bytes=0,
    eos_token_ids=[],
    settings={},
    startup_s=0.0,
)


def write_plan(arena: np.ndarray, step: int, sections: dict[str, list[int]]) -> None:
    """Write a plan block with these sections; the others are empty."""
    words = arena[:PLAN_HEADER_BYTES].view(np.int64)
    words[:] = 0
    words[:3] = (PLAN_MAGIC, VERSION, step)
    offset = PLAN_HEADER_BYTES
    for index, (name, dtype, _) in enumerate(PLAN_SECTIONS):
        values = np.asarray(sections.get(name, []), dtype=dtype)
        words[SECTION_TABLE_WORD + 2 * index] = offset
        words[SECTION_TABLE_WORD + 2 * index + 1] = values.size
        arena[offset : offset + values.nbytes] = values.view(np.uint8)
        offset += values.nbytes + -values.nbytes % 8
    words[4] = offset


def read_result(block: np.ndarray) -> dict[str, list[int]]:
    words = block[:256].view(np.int64)
    sections = {}
    for index, (name, dtype, _) in enumerate(RESULT_SECTIONS):
        start, count = words[SECTION_TABLE_WORD + 2 * index : SECTION_TABLE_WORD + 2 * index + 2]
        sections[name] = block[start : start + 4 * count].view(dtype).tolist()
    return sections


class FakeCore:
    """The scheduler. `log` lists its calls; prompts that begin with 13 are refused.

    What must be prepared is told to its caller, and runs at once all the same.
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.requests: dict[tuple[int, int], messages.Submit] = {}
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.events: dict[int, list[messages.Event]] = {}
        self.in_flight: list[list[tuple[int, int]]] = []
        self.aborted: set[tuple[int, int]] = set()
        self.log: list[str] = []
        self.steps = 0
        self.deadline: float | None = None
        self.entered: dict[tuple[int, int], bool] = {}  # False: not told yet

    def submit(self, client: int, message: bytes, now: float) -> int | None:
        request = msgspec.msgpack.decode(message, type=messages.Submit)
        if request.prompt[0] == 13:
            refused = messages.Refused(request.key, 503, "queue_full", "full", None)
            self._emit(client, refused)
            return None
        self.requests[client, request.key] = request
        self.outputs[client, request.key] = list(
            request.resume[0].output_ids if request.resume else ()
        )
        self.slots[client, request.key] = len(self.slots)
        if request.must_prepare:
            return request.key
        self._emit(client, messages.Accepted(request.key))
        return None

    def abort(self, client: int | None, key: int | None, rid: str | None) -> int:
        self.log.append(f"abort {client} {key} {rid}")
        met = [
            name
            for name, request in self.requests.items()
            if client in (None, name[0]) and key in (None, name[1]) and rid in (None, request.rid)
        ]
        self.aborted.update(met)
        return len(met)

    def plan(self, now: float, arena: memoryview) -> int | None:
        assert len(self.in_flight) <= self.depth
        for name in self.aborted:
            self._finish(name, "abort")
        self.aborted.clear()
        rows = [
            name
            for name, request in self.requests.items()
            if len(self.outputs[name]) + sum(name in step for step in self.in_flight)
            < (request.sampling.max_new_tokens or 0)
        ]
        if not rows:
            return None
        self.steps += 1
        self.log.append(f"plan {self.steps}")
        indices = list(range(len(rows)))
        lasts = [(self.outputs[n] or self.requests[n].prompt)[-1] for n in rows]
        write_plan(
            np.frombuffer(arena, dtype=np.uint8),
            self.steps,
            {
                "row_slot": indices,
                "row_query_len": [1] * len(rows),
                "token_ids": lasts,
                "sample_slot": [self.slots[name] for name in rows],
                "sample_logit": indices,
            },
        )
        self.in_flight.append(rows)
        self.entered |= {name: False for name in rows if name not in self.entered}
        return self.steps

    def take_entered(self) -> list[tuple[int, int]]:
        taken = [name for name, told in self.entered.items() if not told]
        self.entered |= dict.fromkeys(taken, True)
        return taken

    def commit(self, now: float, result: memoryview) -> None:
        block = read_result(np.frombuffer(result, dtype=np.uint8))
        rows = self.in_flight.pop(0)
        self.log.append("commit")
        errors = block["row_errors"] or [0] * len(rows)
        tokens = iter(block["token_ids"])
        for name, error in zip(rows, errors, strict=True):
            if name not in self.requests:
                next(tokens, None)
            elif error:
                self._finish(name, "error")
            else:
                self._append(name, next(tokens))

    def take_events(self) -> list[tuple[int, bytes]]:
        taken, self.events = self.events, {}
        return [(client, msgspec.msgpack.encode(events)) for client, events in taken.items()]

    def has_work(self) -> bool:
        return bool(self.requests)

    def next_deadline(self) -> float | None:
        return self.deadline

    def flush_cache(self) -> bool:
        self.log.append("flush")
        return not self.requests

    def stats(self) -> dict[str, float]:
        return {
            "num_running": len(self.requests),
            "num_waiting": 0,
            "used_tokens": 16 * len(self.requests),
            "prompt_tokens_total": 3 * self.steps,
            "cached_tokens_total": self.steps,
            "generated_tokens_total": sum(map(len, self.outputs.values())),
            "admitted_sequences_total": self.steps,
            "retracted_requests_total": 0,
            "new_token_ratio": 0.7,
        }

    def check_integrity(self) -> None:
        if "broken" in self.log:
            raise RuntimeError("pages leak")

    def _emit(self, client: int, event: messages.Event) -> None:
        self.events.setdefault(client, []).append(event)

    def _append(self, name: tuple[int, int], token: int) -> None:
        client, key = name
        output, request = self.outputs[name], self.requests[name]
        if not output:
            self._emit(client, messages.Started(key, 0, 0, 0, 1.0, 2.0, 0.5))
        offset = len(output)
        output.append(token)
        if len(output) == request.sampling.max_new_tokens:
            self._finish(name, "length", offset)
        else:
            text = f"<{token}>"
            delta = messages.Delta(key, 0, offset, [token], self._text_len(output[:-1]), text)
            self._emit(client, delta)

    def _finish(self, name: tuple[int, int], reason: str, offset: int | None = None) -> None:
        client, key = name
        if name not in self.requests:
            return
        output = self.outputs[name]
        offset = len(output) if offset is None else offset
        finished = messages.Finished(
            key=key,
            sample=0,
            token_offset=offset,
            token_ids=output[offset:],
            text_offset=self._text_len(output[:offset]),
            text="".join(f"<{token}>" for token in output[offset:]),
            logprobs=None,
            prompt_logprobs=None,
            reason=reason,
            matched=None,
            message=None,
            status=500 if reason == "error" else 0,
            completion_tokens=len(output),
            num_retractions=0,
            queue_time=0.25,
        )
        self._emit(client, finished)
        del self.requests[name]

    @staticmethod
    def _text_len(tokens: list[int]) -> int:
        return sum(len(f"<{token}>") for token in tokens)


class FakeRunner:
    """Adds one to each slot's last token; `hook` is called with each plan before."""

    def __init__(self, hook: Callable[[Plan], None] | None = None) -> None:
        self.hook = hook
        self.lasts: dict[int, int] = {}

    def forward(self, plan: Plan) -> None:
        if self.hook is not None:
            self.hook(plan)

    def awaits_earlier(self, plan: Plan) -> bool:
        return False

    def sample(self, plan: Plan) -> Finished:
        tokens = []
        for slot, host_token in zip(
            plan.sample_slot.tolist(), plan.token_ids.tolist(), strict=True
        ):
            self.lasts[slot] = self.lasts.get(slot, host_token) + 1
            tokens.append(self.lasts[slot])
        counts = np.ones(len(tokens), dtype=np.int32)
        sections = {"sample_counts": counts, "token_ids": np.array(tokens, dtype=np.int32)}
        return Finished(encode_result(plan.step, sections))


class FakeEngine:
    """A loop with fakes in a thread, joined to a hub."""

    def __init__(self, core: FakeCore | None = None, runner: FakeRunner | None = None) -> None:
        self.core = core or FakeCore()
        self.hub = LocalHub()
        options = LoopOptions(
            arena_bytes=1 << 16,
            overlap_depth=self.core.depth,
            log_interval_steps=4,
            max_total_tokens=1024,
            beat=self.hub.beat,
        )
        self.loop = EngineLoop(self.core, runner or FakeRunner(), self.hub, options)
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.errors.put(error)
            self.hub.announce_dead(str(error))
        else:
            self.hub.announce_dead("stopped")

    def __enter__(self) -> FakeEngine:
        self.hub.announce_ready(FACTS)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()
