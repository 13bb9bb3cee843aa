"""The `llm` command: a model of its own configuration file, prompts, streams, schemas, tools."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Ask = Callable[..., str]


@pytest.fixture
def ask(
    tmp_path: Path, url: str, scripted_url: str, model: str, documented: Callable[[str, str], str]
) -> Ask:
    """Runs the command; its output."""
    common = "supports_schema: true\n  supports_tools: true\n  api_key_name: none\n"
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: real\n  model_name: {model}\n  api_base: {url}/v1\n  {common}"
        f"- model_id: scripted\n  model_name: fake/model\n  api_base: {scripted_url}/v1\n  {common}"
        f"- model_id: completing\n  model_name: fake/model\n  api_base: {scripted_url}/v1\n"
        "  completion: true\n" + documented("llm", "yaml")
    )

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["llm", *arguments],
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "None"},
            capture_output=True,
            text=True,
            timeout=100,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_prompt(ask: Ask) -> None:
    assert ask("-m", "scripted", "hi") == "Hello world"
    assert ask("-m", "scripted", "--no-stream", "-s", "Be short.", "hi") == "Hello world"


def test_the_documented_configuration(ask: Ask) -> None:
    assert "Paris" in ask(
        *("-m", "trunkline", "-o", "max_tokens", "32", "-o", "temperature", "0"),
        "What is the capital of France?",
    )


def test_completion(ask: Ask) -> None:
    assert ask("-m", "completing", "hi") == "Hello world"


def test_schema(ask: Ask) -> None:
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 20},
            "alive": {"type": "boolean"},
        },
        "required": ["age", "alive"],
        "additionalProperties": False,
    }
    found = ask(
        *("-m", "real", "--schema", json.dumps(schema), "-o", "max_tokens", "64"),
        "A cat.",
    )
    values = json.loads(found)
    assert 0 <= values["age"] <= 20
    assert isinstance(values["alive"], bool)


@pytest.mark.usefixtures("tools")
def test_functions(ask: Ask) -> None:
    """The model may call or not: the command gets through either way."""
    code = "def double(number: int) -> int:\n    'Double a number.'\n    return 2 * number\n"
    ask(
        *("-m", "real", "--functions", code, "-o", "max_tokens", "48", "--chain-limit", "3"),
        "Say hi.",
    )
