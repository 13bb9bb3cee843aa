"""Fuzz a real server with schemathesis by its own OpenAPI document (`make test-schemathesis`).

Fails when an answer is a 5xx other than 503, is not as the document says, or takes a minute, and
when the server has lost its engine, logged a traceback or kept something running afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.process import READY, Process

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
# A 503 is documented: the queue is full, or the engine starts.
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503]
"""
SLOWEST_S = 60


def fuzz(schemathesis: str, server: Process, seconds: int, seed: int) -> int:
    """Run schemathesis; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "schemathesis.toml"
        settings.write_text(SETTINGS)
        command = [
            *(schemathesis, "--config-file", str(settings), "run"),
            f"http://127.0.0.1:{server.port}/openapi.json",
            *("--checks", ",".join(CHECKS), "--continue-on-failure"),
            *("--max-time", str(seconds), "--request-timeout", str(SLOWEST_S)),
            *("--seed", str(seed), "--workers", "2"),
        ]
        return subprocess.run(command, cwd=folder, timeout=seconds + 600).returncode


def complaints(server: Process, engine: int) -> list[str]:
    """What is wrong with the server after the run."""
    found = []
    if "Traceback" in "\n".join(server.lines):
        found.append("the log has a traceback")
    if [child.pid for child in server.children] != [engine]:
        found.append("the engine process is another one than before")
    deadline = time.monotonic() + SLOWEST_S
    while (load := server.http.get("/v1/loads").json()["loads"][0])["num_running_reqs"] or load[
        "num_waiting_reqs"
    ]:
        if time.monotonic() > deadline:
            found.append(f"requests are still there: {load}")
            break
        time.sleep(0.5)
    if server.http.get("/health_generate").status_code != 200:
        found.append("the server does not generate any more")
    return found


def main() -> int:
    """Run it; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program to run")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    server = Process(None, "--context-length", "256", "--max-total-tokens", "4096")
    try:
        server.wait_for(READY)
        [engine] = [child.pid for child in server.children]
        code = fuzz(options.schemathesis, server, options.seconds, options.seed)
        found = complaints(server, engine)
        for line in found:
            print(f"FAILED: {line}")
        if found:
            print("\n".join(server.lines[-200:]))
        return code or bool(found)
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
