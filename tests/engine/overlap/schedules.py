"""Random schedules: requests, aborts, accidents, and the engine that they happen to."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from tests.engine.overlap.device import Faults

from trunkline.engine import messages
from trunkline.engine.core_config import CoreConfig
from trunkline.engine.messages import GrammarSpec, LogprobRequest, SamplingParams
from trunkline.engine.stream import Request

LAST_TURN = 60  # at which something new happens


def letter(token_id: int) -> str:
    return chr(ord("a") + token_id)


def tokenizer_json(vocab_size: int) -> str:
    """Ids 0, 1, ... are the texts a, b, ..."""
    vocab = {letter(token_id): token_id for token_id in range(vocab_size)}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"added_tokens": [], "decoder": decoder, "model": model})


@dataclass(frozen=True)
class Abort:
    """At a turn, or (`after`) once its request has so many tokens: by what name."""

    request: int
    message: messages.Abort
    turn: int | None = None
    after: int = 0


@dataclass
class Schedule:
    """What happens, and to what engine. `deaths` are turns at which the engine is replaced."""

    config: CoreConfig
    requests: list[Request]
    turns: list[int]
    aborts: list[Abort]
    flushes: list[int]
    deaths: list[int]
    faults: Faults
    seed: int

    @property
    def disturbed(self) -> set[int]:
        """Requests whose end depends on when things happen."""
        return {abort.request for abort in self.aborts}


def random_schedule(seed: int, *, accidents: bool = False) -> Schedule:
    """`accidents`: steps fail as a whole, and take their requests with them."""
    source = random.Random(seed)
    config = _random_config(source)
    stems = [_tokens(source, config, source.randint(1, 30)) for _ in range(3)]
    count = source.randint(2, 14)
    requests = [_random_request(source, config, index, stems) for index in range(count)]
    burst = source.random() < 0.3
    turns = [0 if burst else source.randint(0, LAST_TURN) for _ in requests]
    aborts = [_random_abort(source, requests) for _ in range(source.choice([0, 1, 2, 4]))]
    few = 0.1 if accidents else 0.0
    faults = Faults(
        row_error=source.choice([0.0, 0.0, 0.01]),
        disobeys=source.choice([0.0, 0.0, 0.02]),
        forward=few * source.random(),
        sample=few * source.random(),
        wait=few * source.random(),
    )
    return Schedule(
        config=config,
        requests=requests,
        turns=turns,
        aborts=aborts,
        flushes=[source.randint(0, LAST_TURN) for _ in range(source.choice([0, 0, 2]))],
        deaths=[source.randint(1, LAST_TURN)] if source.random() < 0.2 else [],
        faults=faults,
        seed=seed,
    )


def _random_config(source: random.Random) -> CoreConfig:
    page_size = source.choice([1, 2, 4, 16])
    vocab_size = source.randint(4, 14)
    budget = source.randint(2, 24)
    return CoreConfig(
        page_size=page_size,
        num_pages=1 + -(-source.randint(25, 100) // page_size),
        max_running_requests=source.randint(1, 9),
        max_batch_tokens=budget,
        max_chunk_tokens=source.randint(1, budget) if source.random() < 0.4 else None,
        max_context_len=source.randint(60, 110),
        vocab_size=vocab_size,
        eos_token_ids=[vocab_size - 1],
        policy=source.choice(["fcfs", "lpm"]),
        priority_scheduling=source.random() < 0.5,
        aging_steps=source.randint(1, 40),
        prefix_cache=source.random() < 0.85,
        new_token_ratio_init=source.choice([0.0, 0.0, 0.2, 0.7]),
        new_token_ratio_min=0.0,
        new_token_ratio_decay_steps=source.randint(1, 6),
        waiting_timeout_s=0.01 if source.random() < 0.05 else None,
        arena_bytes=1 << 16,
        tokenizer_json=tokenizer_json(vocab_size),
    )


def _tokens(source: random.Random, config: CoreConfig, count: int) -> list[int]:
    return [source.randrange(min(config.vocab_size, 3)) for _ in range(count)]


def _random_request(
    source: random.Random, config: CoreConfig, index: int, stems: list[list[int]]
) -> Request:
    prompt = _tokens(source, config, source.randint(1, 6))
    if source.random() < 0.6:
        stem = source.choice(stems)
        prompt = stem[: source.randint(0, len(stem))] + prompt
    stop = []
    if source.random() < 0.25:
        length = source.randint(1, 3)
        ids = [source.randrange(config.vocab_size) for _ in range(length)]
        stop = ["".join(letter(one) for one in ids)]
    has_grammar = source.random() < 0.35
    pooled = not has_grammar and source.random() < 0.05
    sampling = SamplingParams(
        temperature=source.choice([0.0, 0.7, 1.0]),
        frequency_penalty=source.choice([0.0, 0.0, 0.2]),
        max_new_tokens=0 if pooled else source.randint(1, source.choice([8, 40])),
        min_new_tokens=source.randint(0, 5) if source.random() < 0.2 else 0,
        stop=stop,
        stop_token_ids=[0] if source.random() < 0.15 else [],
        ignore_eos=source.random() < 0.3,
        seed=source.getrandbits(64),
    )
    logprobs = None
    if source.random() < 0.25:
        start = source.choice([None, source.randint(0, len(prompt))])
        logprobs = LogprobRequest(start, source.randint(0, 2), [1] if source.random() < 0.5 else [])
    grammar = None
    if has_grammar:
        number = source.choice([source.randint(0, 40), -1]) if source.random() < 0.1 else 7 * index
        starts_after = [1] if source.random() < 0.2 else []
        grammar = GrammarSpec("ebnf", str(number), starts_after)
    return Request(
        rid=f"r{index}",
        prompt_ids=prompt,
        sampling=sampling,
        n=source.randint(2, 3) if source.random() < 0.2 and not pooled else 1,
        stream_interval=source.choice([1, 1, 0, 3]),
        priority=source.randint(-2, 2),
        namespace="other" if source.random() < 0.15 else "",
        request_class=int(source.random() < 0.2),
        logprobs=logprobs,
        grammar=grammar,
        pooled=pooled,
        received_ts=0.0,
    )


def _random_abort(source: random.Random, requests: list[Request]) -> Abort:
    index = source.randrange(len(requests))
    request = requests[index]
    rid = source.choice([request.rid, request.rid, request.sample_rid(0)])
    by_key = source.random() < 0.3
    message = messages.Abort(key=index + 1) if by_key else messages.Abort(rid=rid)
    if source.random() < 0.6:
        return Abort(index, message, after=source.randint(1, 10))
    return Abort(index, message, turn=source.randint(0, LAST_TURN))
