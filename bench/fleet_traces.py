"""Request traces as the fleet simulator reads them: one JSON object per line, Mooncake's format.

A trace is found by its name in a directory of public traces, by its path, or made by the
simulator's generator. Nothing here knows policies or engines.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trunkline._core import shared_prefix_trace

# Name: file, tokens of a block, milliseconds to which its times are rounded.
MOONCAKE = {
    "conversation": ("conversation_trace.jsonl", 512, 3000),
    "synthetic": ("synthetic_trace.jsonl", 512, 0),
}
AZURE = {"azure_code": "azure_code.csv", "azure_conv": "azure_conv.csv"}
GENERATED_BLOCK_TOKENS = 64
NAMES = (*MOONCAKE, *AZURE, "generated")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, and what the simulator must be told of them."""

    name: str
    lines: str
    block_tokens: int
    spread_s: float
    prompt_tokens: list[int]
    span_s: float


def load(name: str, directory: Path | None, block_tokens: int = 512, seed: int = 0) -> Trace:
    """The trace of this name, or at this path.

    Raises:
        FileNotFoundError: there is no such file; the message names the option that says where.
    """
    rounded_ms = 0
    if name == "generated":
        block_tokens = GENERATED_BLOCK_TOKENS
        settings = {"block_tokens": block_tokens, "seed": seed, "requests": 6000, "groups": 64}
        lines = shared_prefix_trace(json.dumps(settings).encode())
    elif name in AZURE:
        lines = _azure(_path(name, AZURE[name], directory))
    elif name in MOONCAKE:
        file, block_tokens, rounded_ms = MOONCAKE[name]
        lines = _path(name, file, directory).read_text()
    else:
        lines = Path(name).read_text()
    requests = [json.loads(line) for line in lines.splitlines()]
    times = [request["timestamp"] for request in requests]
    return Trace(
        name=Path(name).stem,
        lines=lines,
        block_tokens=block_tokens,
        spread_s=rounded_ms / 1000,
        prompt_tokens=[request["input_length"] for request in requests],
        span_s=(max(times) - min(times) + rounded_ms) / 1000,
    )


def _path(name: str, file: str, directory: Path | None) -> Path:
    if directory is None or not (directory / file).is_file():
        raise FileNotFoundError(
            f"trace {name!r} is the file {file}: pass --traces DIR with the directory that holds "
            "it, or use --trace generated"
        )
    return directory / file


def _azure(path: Path) -> str:
    """Azure's traces have lengths and times only: no prompt is like another."""
    lines = []
    start: datetime | None = None
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            # Seven digits of a second; Python reads six.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or at
            request = {
                "timestamp": 1000 * (at - start).total_seconds(),
                "input_length": max(int(row["ContextTokens"]), 1),
                "output_length": max(int(row["GeneratedTokens"]), 1),
            }
            lines.append(json.dumps(request))
    return "\n".join(lines)
