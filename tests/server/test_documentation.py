"""The programs of README.md, docs and examples, run as they stand (on another port)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.process import Process

ROOT = Path(__file__).parents[2]


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    text = (ROOT / name).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


README_BASH = blocks("README.md", "bash")
EXAMPLES = ROOT / "examples"
README_PYTHON = blocks("README.md", "python")
CURLS = [
    command
    for block in README_BASH
    for command in re.split(r"\n\n(?=curl)", block)
    if command.startswith("curl")
]


def test_no_example_is_missed() -> None:
    assert len(CURLS) == 2
    assert len(README_PYTHON) == 2
    assert len(blocks("docs/api.md", "json")) == 1
    assert len(blocks("docs/engine.md", "python")) == 1
    assert {path.stem for path in EXAMPLES.iterdir()} == {"batch", "structured_output", "tools"}
    for page in ("README.md", "docs/api.md"):
        kinds = set(re.findall(r"^```(\w+)", (ROOT / page).read_text("utf-8"), re.MULTILINE))
        assert kinds <= {"bash", "python", "json"}


@pytest.mark.parametrize("command", CURLS)
def test_the_readmes_requests(default_server: Process, command: str) -> None:
    command = command.replace("30000", str(default_server.port))
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in json.dumps(json.loads(answer.stdout))


def test_the_readmes_client(default_server: Process, capsys: pytest.CaptureFixture[str]) -> None:
    [program] = [code for code in README_PYTHON if "import openai" in code]
    exec(program.replace("30000", str(default_server.port)), {})
    assert "1." in capsys.readouterr().out


def test_the_readmes_engine(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = [code for code in README_PYTHON if "trunkline.Engine" in code]
    exec(program, {})
    assert "Paris" in capsys.readouterr().out


def test_the_embedded_engine(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = blocks("docs/engine.md", "python")
    exec(program, {})
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert "Tokyo" in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("structured_output", ["City(name=", "The capital of France is Paris."]),
        ("tools", ["get_weather({", "'celsius': 21"]),
        ("batch", ["completed=2", "question-0", "Paris", "question-1", "Tokyo"]),
    ],
)
def test_the_examples(default_server: Process, name: str, words: list[str]) -> None:
    program = (EXAMPLES / f"{name}.py").read_text("utf-8")
    done = subprocess.run(
        [sys.executable, "-"],
        input=program.replace("30000", str(default_server.port)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


def test_make_knows_the_readmes_targets() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text("utf-8")))
    assert targets >= {"serve", "test"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_documented_error(default_server: Process) -> None:
    [block] = blocks("docs/api.md", "json")
    documented = json.loads(block)
    response = default_server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}], "temperature": -1},
    )
    assert response.status_code == documented["code"]
    body = response.json()
    assert list(body) == list(documented)
    assert list(body["error"]) == list(documented["error"])
    for place in (body, body["error"], documented, documented["error"]):
        place.pop("message")
    assert body == documented
