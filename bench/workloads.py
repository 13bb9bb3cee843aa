"""The workloads of the serving benchmarks, and what is told of a run.

They need nothing but the standard library and `tokenizers`, so that they run inside the Python of
any engine. What answers is a `Transport`: a server, or a pipeline in this process.

W1  one request at a time, 64 tokens in, 128 out, 8 requests
W2  16 at once, 256 in, 128 out, 64 requests, nothing shared
W3  16 at once, a common prefix of 1,024 tokens and 64 of one's own, 32 out, 64 requests
W4  4 at once, 1,500 in, 4 out, 16 requests
W5  8 conversations at once of 5 turns: 64 tokens of the user, 64 out, the history is sent again
C1, C2, C4 ... C64  so many at once, 256 in, 128 out: throughput against concurrency

Prompts are ids of plain English words, one token each; workload and seed decide them, and each
repetition has a seed of its own, so that none hits what another left in a cache. The history of W5
holds the text that came back, tokenised again, as it does in a chat.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

SHARED_TOKENS = 1024
CONVERSATIONS, TURNS, TURN_TOKENS = 8, 5, 64
SWEEP = (1, 2, 4, 8, 16, 32, 64)
WORD = re.compile("[Ġ▁][a-z]{2,}")  # a space and lower case, as vocabularies write it


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt; times of `time.perf_counter`."""

    sent: float
    arrivals: list[float]  # of each piece of text
    prompt_tokens: int
    output_tokens: int
    text: str


class Transport(Protocol):
    """Something that generates."""

    async def __call__(self, prompt: list[int], output_tokens: int) -> Answer:
        """Generate that many tokens greedily, whatever they are."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a workload."""

    workload: str
    seconds: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float


class Words:
    """The vocabulary from which prompts are made."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.json` of a model's directory."""
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        self.ids = sorted(number for text, number in vocabulary.items() if WORD.fullmatch(text))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class Load:
    """Asks a transport and keeps its answers."""

    def __init__(self, transport: Transport, words: Words, seed: str) -> None:
        """Make a load; `seed` decides all prompts."""
        self._transport = transport
        self._words = words
        self._random = random.Random(seed)
        self.answers: list[Answer] = []

    def prompt(self, tokens: int) -> list[int]:
        """Random words."""
        return self._random.choices(self._words.ids, k=tokens)

    async def send(self, prompt: list[int], output_tokens: int) -> Answer:
        """One request, to its end."""
        answer = await self._transport(prompt, output_tokens)
        self.answers.append(answer)
        return answer

    async def independent(self, number: int, prompt: int, output: int, at_once: int) -> None:
        """Requests that share nothing."""
        prompts = [self.prompt(prompt) for _ in range(number)]
        await self._crowd(prompts, output, at_once)

    async def shared_prefix(self) -> None:
        """64 requests that share 1,024 leading tokens."""
        prefix = self.prompt(SHARED_TOKENS)
        await self._crowd([prefix + self.prompt(64) for _ in range(64)], 32, 16)

    async def conversations(self) -> None:
        """Chats that grow, each sent again as a whole at every turn."""
        turns = [[self.prompt(TURN_TOKENS) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]

        async def converse(own: list[list[int]]) -> None:
            history: list[int] = []
            for turn in own:
                history += turn
                answer = await self.send(history, TURN_TOKENS)
                history = history + self._words.encode(answer.text)

        await asyncio.gather(*(converse(own) for own in turns))

    async def _crowd(self, prompts: list[list[int]], output: int, at_once: int) -> None:
        left = iter(prompts)

        async def worker() -> None:
            for prompt in left:
                await self.send(prompt, output)

        await asyncio.gather(*(worker() for _ in range(at_once)))


def _sweep(at_once: int) -> Callable[[Load], Awaitable[None]]:
    number = max(4, min(2 * at_once, 64))
    return lambda load: load.independent(number, 256, 128, at_once)


WORKLOADS: dict[str, Callable[[Load], Awaitable[None]]] = {
    "W1": lambda load: load.independent(8, 64, 128, 1),
    "W2": lambda load: load.independent(64, 256, 128, 16),
    "W3": Load.shared_prefix,
    "W4": lambda load: load.independent(16, 1500, 4, 4),
    "W5": Load.conversations,
    **{f"C{at_once}": _sweep(at_once) for at_once in SWEEP},
}


async def measure(transport: Transport, words: Words, name: str, seed: str) -> Result:
    """One run of one workload."""
    load = Load(transport, words, f"{name} {seed}")
    start = time.perf_counter()
    await WORKLOADS[name](load)
    return summary(name, load.answers, start)


async def warm_up(transport: Transport, words: Words) -> None:
    """Have every width of step and length of prompt computed once, before anything is timed."""
    load = Load(transport, words, seed="warm-up")
    await load.independent(1, 64, 16, 1)
    await load.independent(16, 256, 8, 16)
    await load.independent(2, 1500, 2, 2)


def summary(workload: str, answers: list[Answer], start: float) -> Result:
    """Sum up."""
    elapsed = max(answer.arrivals[-1] for answer in answers) - start
    first = [1e3 * (answer.arrivals[0] - answer.sent) for answer in answers]
    gaps = [
        1e3 * (after - before)
        for answer in answers
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]
    return Result(
        workload=workload,
        seconds=elapsed,
        requests_per_s=len(answers) / elapsed,
        input_tokens_per_s=sum(answer.prompt_tokens for answer in answers) / elapsed,
        output_tokens_per_s=sum(answer.output_tokens for answer in answers) / elapsed,
        first_token_p50_ms=statistics.median(first),
        first_token_p99_ms=percentile(first, 0.99),
        inter_token_p50_ms=statistics.median(gaps),
        inter_token_p99_ms=percentile(gaps, 0.99),
    )


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of all lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median_of(results: list[Result]) -> Result:
    """Field by field."""
    rows = [asdict(result) for result in results]
    numbers = {
        key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "workload"
    }
    return Result(workload=results[0].workload, **numbers)
