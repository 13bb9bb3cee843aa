"""The clients, each in an environment of its own: their dependencies contradict each other.

Environments lie in a cache directory and are made again only when what they need has changed.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_RUNNER = ("pytest>=8,<10", "pytest-timeout>=2.3,<3")


@dataclass(frozen=True)
class Client:
    """A client: what to install, and the programs (files of this directory) that use it."""

    name: str
    requirements: tuple[str, ...]
    programs: tuple[str, ...]


CLIENTS = (
    Client("openai-2", ("openai>=2,<3",), ("use_openai.py", "use_openai_batches.py")),
    Client("openai-3", ("openai>=3,<4",), ("use_openai.py", "use_openai_batches.py")),
    Client("langchain-openai", ("langchain-openai>=1.1,<2",), ("use_langchain.py",)),
    Client("llama-index", ("llama-index-llms-openai-like>=0.5,<0.9",), ("use_llama_index.py",)),
    Client("litellm", ("litellm>=1.80,<2",), ("use_litellm.py",)),
    Client("instructor", ("instructor>=1.13,<2",), ("use_instructor.py",)),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]>=2,<3",), ("use_pydantic_ai.py",)),
    Client("llm", ("llm>=0.27,<1",), ("use_llm.py",)),
    Client("anthropic", ("anthropic>=0.75,<3",), ("use_anthropic.py",)),
)


def environment(cache: Path, client: Client) -> Path:
    """The interpreter of the client's environment, which is made where it is missing.

    Raises:
        subprocess.CalledProcessError: pip could not install what the client needs.
    """
    folder = cache / client.name
    python = folder / "bin" / "python"
    marker = folder / ".installed"
    wanted = "\n".join((*client.requirements, *_RUNNER))
    if marker.exists() and marker.read_text() == wanted:
        return python
    print(f"Installing {client.name} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *client.requirements, *_RUNNER], check=True)
    marker.write_text(wanted)
    return python
