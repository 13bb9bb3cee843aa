"""How fast does a server answer? The workloads of `workloads.py` over streaming `/v1/completions`.

Works against any server that speaks the OpenAI API and takes prompts as lists of token ids. One
connection per request. The load generator shares the server's cores, so it does as little as it can
while a stream runs: it notes when bytes arrive, and looks into them when the stream has ended.

    engine-serve --model DIR --port 30000 &
    python bench/serving.py --url http://127.0.0.1:30000 --tokenizer DIR [--workloads W1 W2]
        [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import platform
import time
from collections.abc import Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvloop
from workloads import WORKLOADS, Answer, Words, measure, median_of, warm_up

T = TypeVar("T")
HEADINGS = ("req/s", "in tok/s", "out tok/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99")


class HttpTransport:
    """Streams completions from a server."""

    def __init__(self, url: str, model: str) -> None:
        """Make a transport; nothing is sent yet."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._model = model

    async def __call__(self, prompt: list[int], output_tokens: int) -> Answer:
        """See `workloads.Transport`.

        Raises:
            RuntimeError: the server refused, or failed half-way.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        sent = time.perf_counter()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        pieces, times = [], []
        try:
            writer.write(head.encode() + content)
            while piece := await reader.read(1 << 16):
                times.append(time.perf_counter())
                pieces.append(piece)
        finally:
            writer.close()
        return _parse(sent, pieces, times, len(prompt))


def _parse(sent: float, pieces: list[bytes], times: list[float], prompt_tokens: int) -> Answer:
    """Find the events in what was received."""
    head, _, _ = b"".join(pieces[:8]).partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(f"the server answered {b''.join(pieces)[:2000]!r}")
    raw = b"".join(pieces)
    ends, total = [], 0
    for piece in pieces:
        total += len(piece)
        ends.append(total)
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    arrivals, texts, output_tokens = [], [], 0
    for end, event in _events(raw, len(head) + 4, is_chunked):
        chunk = json.loads(event)
        if "error" in chunk:
            raise RuntimeError(f"the stream broke off: {chunk['error']}")
        if chunk.get("usage"):
            output_tokens = chunk["usage"]["completion_tokens"]
        text = chunk["choices"][0].get("text") if chunk["choices"] else None
        if text:
            texts.append(text)
            arrivals.append(times[bisect.bisect_left(ends, end)])
    if not arrivals or not output_tokens:
        raise RuntimeError(f"the stream held no text or no usage: {raw[-2000:]!r}")
    return Answer(sent, arrivals, prompt_tokens, output_tokens, "".join(texts))


def _events(raw: bytes, start: int, is_chunked: bool) -> Iterator[tuple[int, bytes]]:
    """Each event's JSON, and the offset in `raw` behind it."""
    body, offsets = bytearray(), []  # offsets: (end in the body, what to add to be in `raw`)
    position = start
    while is_chunked:
        line_end = raw.index(b"\r\n", position)
        size = int(raw[position:line_end].partition(b";")[0], 16)
        if size == 0:
            break
        begin = line_end + 2
        offsets.append((len(body) + size, begin - len(body)))
        body += raw[begin : begin + size]
        position = begin + size + 2
    if not is_chunked:
        body += raw[start:]
        offsets.append((len(body), start))
    index, end = 0, 0
    for line in bytes(body).split(b"\n"):
        end += len(line) + 1
        if line.startswith(b"data: {"):
            while offsets[index][0] < end - 1:
                index += 1
            yield end - 1 + offsets[index][1], line[6:]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop that costs little."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def cells(result: dict[str, Any]) -> str:
    """The figures of a result as cells of a table, in the order of `HEADINGS`."""
    numbers = [value for key, value in result.items() if key not in ("workload", "seconds")]
    return " | ".join(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in numbers)


def main() -> None:
    """Run the workloads and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's directory")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS)[:5])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", default="0", help="a new one for a server that knows the last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transport, words = HttpTransport(options.url, options.model), Words(options.tokenizer)
    run(warm_up(transport, words))
    medians = []
    print(f"{platform.processor() or platform.machine()}, {options.runs} runs, medians")
    print(f"| workload | {' | '.join(HEADINGS)} |")
    print("|---" * (len(HEADINGS) + 1) + "|")
    for name in options.workloads:
        runs = [
            run(measure(transport, words, name, seed=f"{options.seed} {number}"))
            for number in range(options.runs)
        ]
        medians.append(median_of(runs))
        print(f"| {name} | {cells(asdict(medians[-1]))} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in medians], indent=1))


if __name__ == "__main__":
    main()
