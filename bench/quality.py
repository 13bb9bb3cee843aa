"""What quantisation costs in quality: perplexity, and agreement with the unquantised model.

The text is the language reference that comes with Python (`pydoc_data`), cut into windows that are
scored as prompts; so every figure goes through the engine's own prompt log-probs. The first setting
is what the others are compared with, position by position.

    python bench/quality.py [MODEL] [--settings none int8 gguf] [--dtype bfloat16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trunkline import Engine

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Of every scored position: the log-prob of the text's token, and the likeliest token."""

    logprobs: FloatArray
    best: npt.NDArray[np.int64]
    best_logprobs: FloatArray


@dataclass(frozen=True)
class Record:
    """One setting's figures; differences are to the first setting."""

    setting: str
    perplexity: float
    perplexity_change_percent: float
    mean_logprob_error: float
    p99_logprob_error: float
    same_best_percent: float


def text() -> str:
    """English prose about a programming language, some 460,000 characters."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def windows(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Token ids of `count` windows, evenly spread over the text."""
    ids = engine.tokenizer.encode(text())
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [ids[start : start + length] for start in starts]


def score(model: str | None, setting: str, dtype: str, count: int, length: int) -> Scores:
    """Score the windows under one setting."""
    options = {} if model is None else {"model_path": model}
    with Engine(**options, quantization=setting, dtype=dtype, log_level="error") as engine:
        outputs = engine.generate(
            input_ids=windows(engine, count, length),
            sampling_params={"max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
    tokens, best = [], []
    for output in outputs:
        facts = output["meta_info"]
        tokens += [entry[0] for entry in facts["input_token_logprobs"][1:]]
        best += [entries[0][:2] for entries in facts["input_top_logprobs"][1:]]
    return Scores(
        np.array(tokens, np.float64),
        np.array([one[1] for one in best], np.int64),
        np.array([one[0] for one in best], np.float64),
    )


def compare(setting: str, scores: Scores, first: Scores) -> Record:
    """A setting's figures."""
    perplexity = math.exp(-scores.logprobs.mean())
    errors = np.abs(scores.logprobs - first.logprobs)
    return Record(
        setting=setting,
        perplexity=perplexity,
        perplexity_change_percent=100 * (perplexity / math.exp(-first.logprobs.mean()) - 1),
        mean_logprob_error=float(errors.mean()),
        p99_logprob_error=float(np.percentile(errors, 99)),
        same_best_percent=100 * float((scores.best == first.best).mean()),
    )


def main() -> None:
    """Score all settings, print a line each, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: the embedded model")
    parser.add_argument("--settings", nargs="+", default=["none", "int8", "gguf"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records, first = [], None
    for setting in arguments.settings:
        scores = score(
            arguments.model, setting, arguments.dtype, arguments.windows, arguments.length
        )
        first = first or scores
        record = compare(setting, scores, first)
        records.append(asdict(record))
        print(
            f"{setting:5} perplexity {record.perplexity:.4f} "
            f"({record.perplexity_change_percent:+.3f} %), log-prob error mean "
            f"{record.mean_logprob_error:.4f} p99 {record.p99_logprob_error:.4f}, "
            f"same best token {record.same_best_percent:.2f} %",
            flush=True,
        )
    if arguments.json is not None:
        facts = {"model": arguments.model, "tokens": first.logprobs.size, "records": records}
        arguments.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
