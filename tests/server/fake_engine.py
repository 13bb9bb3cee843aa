"""An engine without a model: the real client over a channel that plays answers by a script.

Tokens are bytes, so texts and counts are easy to foresee. Stop strings, stop ids, length and abort
behave as documented for the scheduler.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from trunkline.engine import messages
from trunkline.engine.channel import Changed, Deliver
from trunkline.engine.messages import EngineFacts, EngineStatus, Logprobs, Submit

EOS = 256
VOCAB = 300
CONTEXT = 512
HIDDEN = 4
FACTS = EngineFacts(
    pid=1,
    model_path="fake/model",
    dtype="float32",
    device="cpu",
    weight_version="default",
    vocab_size=VOCAB,
    page_size=16,
    context_length=CONTEXT,
    max_total_tokens=4096,
    max_running_requests=64,
    max_batch_tokens=256,
    chunked_prefill_size=None,
    weight_bytes=1 << 20,
    kv_cache_bytes=1 << 20,
    eos_token_ids=[EOS],
    settings={"model_path": "fake/model"},
    startup_s=0.5,
)


class ByteTokenizer:
    """One token per UTF-8 byte, and an end token."""

    def most_chars(self, tokens: int) -> int | None:
        return 4 * tokens  # a looser bound than need be, as real ones are

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = bytes(one for one in ids if one < 256)
        tail = "<end>" if not skip_special_tokens and EOS in ids else ""
        return kept.decode(errors="replace") + tail

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def token_of(self, token_id: int) -> str | None:
        return f"<0x{token_id:02X}>" if token_id < 256 else "<end>"


def _answer(prompt: list[int], sample: int) -> str:
    return "Hello world"


@dataclass
class FakeEngine:
    """A channel. `answer` is what each sample says; `delay_s` passes between tokens.

    With `hold` set, requests wait in the queue; `refuse` refuses them. `kill` loses the engine,
    `restart` brings another.
    """

    answer: Callable[[list[int], int], str] = _answer
    delay_s: float = 0.0
    hold: bool = False
    refuse: messages.Refused | None = None
    fail_after: int | None = None
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._status = EngineStatus(state="ready", epoch=1, heartbeat_age_s=0.1, facts=FACTS)
        self._live: dict[int, Submit] = {}
        self._stopped: set[int] = set()

    async def open(self, deliver: Deliver, changed: Changed) -> None:
        self._deliver, self._changed = deliver, changed

    def status(self) -> EngineStatus:
        return self._status

    def entered(self, epoch: int) -> None:
        return None

    def set_status(self, state: str, error: str | None = None) -> None:
        self._status = msgspec.structs.replace(self._status, state=state, error=error)
        self._changed()

    def kill(self) -> None:
        for task in self.running.values():
            task.cancel()
        self.running.clear()
        self._live.clear()
        self.set_status("starting", "the engine process was killed by SIGKILL")

    def restart(self) -> None:
        self._status = msgspec.structs.replace(self._status, epoch=self._status.epoch + 1)
        self.set_status("ready")

    async def close(self) -> None:
        for task in self.running.values():
            task.cancel()

    def send(self, kind: bytes, epoch: int, payload: bytes) -> None:
        if kind == messages.SUBMIT:
            self._submit(msgspec.msgpack.decode(payload, type=Submit))
        elif kind == messages.ABORT:
            self._abort(msgspec.msgpack.decode(payload, type=messages.Abort))
        else:
            self._control(msgspec.msgpack.decode(payload, type=messages.Control))

    def _emit(self, *events: messages.Event) -> None:
        asyncio.get_running_loop().call_soon(
            self._deliver, self._status.epoch, msgspec.msgpack.encode(list(events))
        )

    def _submit(self, submit: Submit) -> None:
        self.submitted.append(submit)
        if self.refuse is not None:
            self._emit(msgspec.structs.replace(self.refuse, key=submit.key))
            return
        if any(live.rid == submit.rid for live in self._live.values()):
            text = f"Duplicate request ID detected: {submit.rid!r} is in flight."
            self._emit(messages.Refused(submit.key, 400, "invalid_request_error", text, "rid"))
            return
        self._live[submit.key] = submit
        self._emit(messages.Accepted(submit.key))
        if not self.hold:
            self.running[submit.key] = asyncio.create_task(self._run(submit))

    def _abort(self, abort: messages.Abort) -> None:
        for key, submit in list(self._live.items()):
            if not (abort.all or abort.key == key or abort.rid == submit.rid):
                continue
            self.aborted.append(submit.rid)
            self._stopped.add(key)
            if key not in self.running:
                self._emit(*(self._end(submit, n, 0, 0, "abort") for n in range(submit.n)))
                del self._live[key]

    def _control(self, control: messages.Control) -> None:
        replies: dict[str, dict[str, object]] = {
            "flush_cache": {"flushed": not self._live},
            "stats": {
                "num_running": len(self.running),
                "num_waiting": len(self._live) - len(self.running),
                "used_tokens": sum(len(one.prompt) for one in self._live.values()),
                "total_tokens": 4096,
                "cached_tokens_total": 10,
                "prompt_tokens_total": 30,
                "retracted_requests_total": 2,
                "gen_throughput": 12.5,
            },
        }
        self._emit(messages.ControlReply(control.key, replies[control.verb]))

    async def _run(self, submit: Submit) -> None:
        try:
            plays = [_Play(submit, n, self.answer(submit.prompt, n)) for n in range(submit.n)]
            for play in plays:
                self._emit(play.started())
            while unfinished := [play for play in plays if not play.is_over]:
                await asyncio.sleep(self.delay_s)
                for play in unfinished:
                    self._step(submit, play)
        finally:
            self.running.pop(submit.key, None)
            self._live.pop(submit.key, None)

    def _step(self, submit: Submit, play: _Play) -> None:
        if submit.key in self._stopped:
            play.is_over = True
            self._emit(play.event("abort", None))
            return
        if self.fail_after is not None and len(play.ids) >= self.fail_after:
            play.is_over = True
            self._emit(play.event("error", None, "logits are not finite", 500))
            return
        event = play.step()
        if event is not None:
            self._emit(event)

    def _end(
        self, submit: Submit, sample: int, tokens: int, chars: int, reason: str
    ) -> messages.Finished:
        return messages.Finished(
            submit.key, sample, tokens, [], chars, "", None, None, reason, None,
            "Abort in waiting queue", 0, tokens, 0, 0.0,
        )  # fmt: skip


class _Play:
    """One sample's answer, token by token."""

    def __init__(self, submit: Submit, sample: int, answer: str) -> None:
        self.submit = submit
        self.sample = sample
        self.script = [*answer.encode(), EOS]
        known = submit.resume[sample] if submit.resume else messages.Resume([], 0)
        self.ids = list(known.output_ids)
        self.sent_ids = len(self.ids)
        self.sent_chars = known.delivered_chars
        self.is_over = False

    def started(self) -> messages.Started:
        cached = len(self.submit.prompt) // 2
        now = time.time()
        return messages.Started(self.submit.key, self.sample, cached, 0, now, now, 0.001)

    def step(self) -> messages.Delta | messages.Finished | None:
        sampling = self.submit.sampling
        longest = CONTEXT - len(self.submit.prompt)
        if sampling.max_new_tokens is not None:
            longest = min(longest, sampling.max_new_tokens)
        if len(self.ids) < longest:
            self.ids.append(self._next())
        ends = [EOS, *sampling.stop_token_ids] if not sampling.ignore_eos else []
        text = self._text()
        for stop in sampling.stop:
            if stop in text:
                return self._finish("stop", stop)
        if self.ids and self.ids[-1] in ends and len(self.ids) > sampling.min_new_tokens:
            return self._finish("stop", self.ids[-1])
        if len(self.ids) >= longest:
            return self._finish("length", None)
        interval = self.submit.stream_interval
        if interval and (len(self.ids) == 1 or len(self.ids) % interval == 0):
            return self._delta()
        return None

    def _next(self) -> int:
        bias = dict(self.submit.sampling.logit_bias)
        if bias and max(bias.values()) >= 100:
            return max(bias, key=lambda token: bias[token])
        return self.script[len(self.ids) % len(self.script)]

    def _text(self) -> str:
        return bytes(one for one in self.ids if one < 256).decode(errors="ignore")

    def _held_back(self, text: str) -> int:
        stops = self.submit.sampling.stop
        most = max((len(stop) for stop in stops), default=1) - 1
        for length in range(min(most, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in stops):
                return length
        return 0

    def _finish(self, reason: str, matched: int | str | None) -> messages.Finished:
        self.is_over = True
        return self.event(reason, matched)

    def event(
        self, reason: str, matched: int | str | None, message: str | None = None, status: int = 0
    ) -> messages.Finished:
        text = self._text()
        if isinstance(matched, str):
            keep = len(matched) if self.submit.sampling.no_stop_trim else 0
            text = text[: text.index(matched) + keep]
        return messages.Finished(
            self.submit.key, self.sample, self.sent_ids, self.ids[self.sent_ids :],
            self.sent_chars, text[self.sent_chars :], self._logprobs(), self._prompt_logprobs(),
            reason, matched, message, status, len(self.ids), 0, 0.001, self._pooled_state(reason),
        )  # fmt: skip

    def _delta(self) -> messages.Delta:
        text = self._text()
        text = text[: len(text) - self._held_back(text)]
        delta = messages.Delta(
            self.submit.key, self.sample, self.sent_ids, self.ids[self.sent_ids :],
            self.sent_chars, text[self.sent_chars :], self._logprobs(), self._prompt_logprobs(),
        )  # fmt: skip
        self.sent_ids, self.sent_chars = len(self.ids), len(text)
        return delta

    def _logprobs(self) -> Logprobs | None:
        wanted = self.submit.logprobs
        if wanted is None:
            return None
        ids = self.ids[self.sent_ids :]
        return _scores(ids, wanted)

    def _pooled_state(self, reason: str) -> bytes | None:
        """Its first element is twice the prompt's sum, the second its length, the others are 0."""
        if not self.submit.pooled or reason != "length":
            return None
        state = [2.0 * sum(self.submit.prompt), float(len(self.submit.prompt)), 0.0, 0.0]
        return struct.pack(f"<{HIDDEN}f", *state)

    def _prompt_logprobs(self) -> Logprobs | None:
        wanted = self.submit.logprobs
        if wanted is None or wanted.prompt_start is None or self.sent_ids:
            return None
        scores = _scores(self.submit.prompt[wanted.prompt_start :], wanted)
        if wanted.prompt_start == 0 and scores.values:
            scores.values[0] = float("nan")
        return scores


def _scores(ids: list[int], wanted: messages.LogprobRequest) -> Logprobs:
    """Token i scores -i/1000; the token itself is the best one."""
    return Logprobs(
        values=[-one / 1000 for one in ids],
        top=[[(-(one + k) / 1000, (one + k) % VOCAB) for k in range(wanted.top_n)] for one in ids],
        ids=[[(-other / 1000, other) for other in wanted.ids] for _ in ids],
    )
