"""The check of a GPU takes the same paths in its dry run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(tmp_path: Path, *arguments: str) -> dict[str, object]:
    report = tmp_path / "report.json"
    command = [sys.executable, "bench/gpu_check.py", *arguments, "--json", str(report)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    facts: dict[str, object] = json.loads(report.read_text())
    return facts


@pytest.mark.parametrize("only", ["kernels", pytest.param("decode", marks=pytest.mark.slow)])
def test_dry_run(tmp_path: Path, only: str) -> None:
    facts = run(tmp_path, "--dry-run", "--only", only)
    findings = facts["findings"]
    assert isinstance(findings, list)
    assert len(findings) >= 8
    assert all(finding["passed"] is not False for finding in findings)


def test_without_a_gpu_it_says_what_to_do() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "bench/gpu_check.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--dry-run" in done.stdout


def test_it_needs_no_more_than_it_says() -> None:
    """A GPU machine without a network has torch, Triton and NumPy."""
    code = """
import sys
ABSENT = {"msgspec", "tokenizers", "xgrammar", "starlette", "zmq", "orjson", "safetensors", "gguf"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT or name == "trunkline._core":
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
sys.path[:0] = ["bench", "src"]
import gpu_kernels, gpu_model, gpu_sampling
import trunkline.kernels.triton.backend
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
