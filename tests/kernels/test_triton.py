"""Triton kernels without a GPU: interpreted against references, and compiled for three GPUs.

Both happen in processes of their own: whether Triton interprets or compiles is decided when it is
imported. `tests/kernels/triton/conftest.py` says more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def run(arguments: list[str], **variables: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def interpret(marker: str) -> None:
    run(
        ["pytest", "tests/kernels/triton", "-p", "no:cacheprovider", "-m", marker],
        TRITON_INTERPRET="1",
    )


def cross_compile(arguments: list[str], report: Path) -> None:
    arguments = ["tests.kernels.triton.cross_compile", *arguments, "--report", str(report)]
    run(arguments)
    results = json.loads(report.read_text())
    assert results
    assert all(result["registers"] > 0 for result in results)


@pytest.mark.timeout(900)  # many tests in one
def test_interpreted_kernels_agree_with_references() -> None:
    interpret("not slow")


@pytest.mark.slow
def test_interpreted_kernels_agree_with_references_over_the_whole_matrix() -> None:
    interpret("slow")


def test_steps_call_torch_as_a_cuda_device_allows() -> None:
    run(["tests.kernels.triton.fake_device"])


@pytest.mark.timeout(900)
def test_kernels_compile_for_one_gpu(tmp_path: Path) -> None:
    cross_compile(["--targets", "90", "--quick"], tmp_path / "report.json")


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 100])
def test_kernels_compile_in_every_configuration(tmp_path: Path, target: int) -> None:
    cross_compile(["--targets", str(target)], tmp_path / "report.json")
