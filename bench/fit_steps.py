"""How long does a step of our own engine take? Coefficients for `bench/fleet.py --step-time`.

Either reads steps that an engine wrote (`TRUNKLINE_STEP_TIMES=/path/steps.jsonl engine-serve`), or
runs an engine of its own on a mix of prompts and answers. Fits, without negative coefficients, the
linear model of `rust/router/src/sim/step_time.rs` by least squares of relative errors.

    python bench/fit_steps.py --json cpu.json [--steps steps.jsonl] [--model-path PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trunkline.engine.env_vars import STEP_TIMES
from trunkline.engine.step_times import WORK_NAMES

COEFFICIENTS = ("fixed_s", "prompt_token_s", "decode_row_s", "decode_context_s", "prompt_pair_s")
Floats = npt.NDArray[np.float64]


def fit(rows: Floats, seconds: Floats) -> Floats:
    """Coefficients of the columns, none below 0, for the least squares of relative errors.

    Columns whose coefficient would be negative are left out, the worst first.
    """
    weighted = rows / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    used = list(range(rows.shape[1]))
    while True:
        solved = np.linalg.lstsq(weighted[:, used] / scale[used], np.ones(len(seconds)))[0]
        if (solved >= 0).all():
            break
        del used[int(solved.argmin())]
    coefficients = np.zeros(rows.shape[1])
    coefficients[used] = solved / scale[used]
    return coefficients


def read(path: Path) -> tuple[Floats, Floats]:
    """Steps of a file: one row of 1 and the work for each, and its seconds."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    rows = np.array([[1.0, *(step[name] for name in WORK_NAMES)] for step in steps])
    return rows, np.array([step["seconds"] for step in steps])


def run_engine(model_path: str | None, path: Path, rounds: int) -> None:
    """Let an engine compute prompts and answers of all sizes, alone and together."""
    os.environ[STEP_TIMES] = str(path)
    import trunkline

    rng = random.Random(1)
    settings = {"model_path": model_path} if model_path else {}
    with trunkline.Engine(**settings) as engine:
        for round_number in range(rounds):
            together = (1, 2, 4, 8, 16)[round_number % 5]
            prompts = [
                [rng.randrange(1000, 20_000) for _ in range(rng.choice((32, 128, 512, 1024)))]
                for _ in range(together)
            ]
            parameters = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
            engine.generate(input_ids=prompts, sampling_params=parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, help="steps that an engine wrote; default: run one")
    parser.add_argument("--model-path", help="model of the engine to run")
    parser.add_argument("--rounds", type=int, default=20, help="batches that the engine computes")
    parser.add_argument("--json", type=Path, help="write the coefficients here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = arguments.steps or Path(directory) / "steps.jsonl"
        if arguments.steps is None:
            run_engine(arguments.model_path, path, arguments.rounds)
        rows, seconds = read(path)
    coefficients = fit(rows, seconds)
    errors = np.abs(rows @ coefficients / seconds - 1)
    for name, value in zip(COEFFICIENTS, coefficients, strict=True):
        print(f"{name:>18} {value:.3e}")
    print(
        f"{len(seconds)} steps; relative error: median {np.median(errors):.1%}, "
        f"p90 {np.quantile(errors, 0.9):.1%}"
    )
    if arguments.json:
        step_time = dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True))
        quality = {"steps": len(seconds), "median_error": float(np.median(errors))}
        arguments.json.write_text(json.dumps({"step_time": step_time, **quality}, indent=2))


if __name__ == "__main__":
    main()
