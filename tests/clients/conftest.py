"""What programs of all clients share. Knows no client: only the standard library and pytest.

`CLIENTS_MODEL_URL` is a server with the default model, `CLIENTS_SCRIPTED_URL` one whose every
answer is "Hello world", a byte per token.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = "SmolLM2-135M-Instruct"


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the answer of a plain request."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["CLIENTS_MODEL_URL"]


@pytest.fixture(scope="session")
def scripted_url() -> str:
    return os.environ["CLIENTS_SCRIPTED_URL"]


@pytest.fixture(scope="session")
def tools(url: str) -> None:
    """Skips the test, with the server's own words, where the server says that it has no tools."""
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    status, answer = ask(
        url,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": function}],
            "max_tokens": 1,
        },
    )
    if status == 400 and answer["error"]["param"] == "tools":
        pytest.skip(f"the server serves no tools: {answer['error']['message']}")
    assert status == 200, answer


@pytest.fixture(scope="session")
def responses_tools(url: str, tools: None) -> None:
    """As `tools`, for `/v1/responses`."""
    function = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    status, answer = ask(
        url, "/v1/responses", {"input": "hi", "tools": [function], "max_output_tokens": 16}
    )
    if status == 400 and str(answer["error"]["param"]).startswith("tool"):
        pytest.skip(f"/v1/responses serves no tools: {answer['error']['message']}")
    assert status == 200, answer


@pytest.fixture(scope="session")
def messages_tools(url: str, tools: None) -> None:
    """As `tools`, for `/v1/messages`."""
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    status, answer = ask(url, "/v1/messages", body)
    if status == 400 and "tool" in answer["error"]["message"]:
        pytest.skip(f"/v1/messages serves no tools: {answer['error']['message']}")
    assert status == 200, answer


@pytest.fixture(scope="session")
def documented(url: str) -> Callable[[str, str], str]:
    """Gives the code block in a language below a heading of docs/clients.md, for this server."""
    text = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")

    def find(heading: str, language: str) -> str:
        section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        [block] = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        return block.replace("http://127.0.0.1:30000", url)

    return find


@pytest.fixture(scope="session")
def run_documented(documented: Callable[[str, str], str]) -> Callable[[str], str]:
    """Runs the Python program below a heading of docs/clients.md; what it prints."""

    def run(heading: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", documented(heading, "python")],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
