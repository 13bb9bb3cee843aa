"""Compare scores through our API with those of `transformers` (`make test-lm-eval`).

lm-eval's `local-completions` (echo and log-probs) must give the same metrics as its `hf` on the
same float32 weights, and each log-likelihood within a hundredth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.evaluation.export import export_default_model
from tests.server.process import READY, Process

HERE = Path(__file__).parent
REQUIREMENTS = ("lm-eval[api,hf]>=0.4.9,<0.5",)
NAME = "float32"
LARGEST_DIFFERENCE = 1e-2
SLOWEST_S = 900


def environment(cache: Path) -> Path:
    """The interpreter of lm-eval's environment, which sees this one's packages (torch is large)."""
    folder = cache / "lm-eval"
    python = folder / "bin" / "python"
    marker = folder / ".installed"
    ours = sysconfig.get_paths()["purelib"]
    wanted = "\n".join((*REQUIREMENTS, ours))
    if marker.exists() and marker.read_text() == wanted:
        return python
    print(f"Installing lm-eval into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    theirs = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    (Path(theirs) / "shared.pth").write_text(f"{ours}\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *REQUIREMENTS], check=True)
    marker.write_text(wanted)
    return python


def evaluate(python: Path, folder: Path, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """The scores by one of lm-eval's kinds of models."""
    output = folder / f"{kind}.json"
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run(
        [python, HERE / "score.py", kind, json.dumps(options), output],
        cwd=HERE,
        env={**environ, **offline, "OPENAI_API_KEY": "None"},
        check=True,
        timeout=SLOWEST_S,
    )
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What is not the same."""
    found = []
    if ours["metrics"] != theirs["metrics"]:
        found.append(f"metrics are {ours['metrics']}, by transformers {theirs['metrics']}")
    largest = 0.0
    num_values = 0
    for number, (row, expected) in enumerate(zip(ours["rows"], theirs["rows"], strict=True)):
        for (score, is_greedy), (score_there, is_greedy_there) in zip(row, expected, strict=True):
            num_values += 1
            largest = max(largest, abs(score - score_there))
            if abs(score - score_there) > LARGEST_DIFFERENCE or is_greedy != is_greedy_there:
                found.append(
                    f"row {number}: {score}, greedy {is_greedy}; by transformers {score_there}, "
                    f"greedy {is_greedy_there}"
                )
    print(f"{ours['metrics']}; {num_values} log-likelihoods, largest difference {largest:.2e}")
    return found


def main() -> int:
    """Run both; 0 when they agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="where the environment is kept")
    options = parser.parse_args()
    python = environment(options.cache)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directory = folder / "model"
        directory.mkdir()
        export_default_model(directory)
        theirs = evaluate(
            python,
            folder,
            "hf",
            {"pretrained": str(directory), "dtype": "float32", "device": "cpu"},
        )
        server = Process(directory, "--served-model-name", NAME)
        try:
            server.wait_for(READY)
            ours = evaluate(
                python,
                folder,
                "local-completions",
                {
                    "base_url": f"http://127.0.0.1:{server.port}/v1/completions",
                    "model": NAME,
                    "tokenizer": str(directory),
                    "num_concurrent": 4,
                    "max_retries": 1,
                },
            )
        finally:
            server.close()
    found = compare(ours, theirs)
    print("\n".join(f"FAILED: {line}" for line in found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
