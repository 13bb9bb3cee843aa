"""Run every client's programs against two servers (`make test-clients`).

One serves the default model, the other says "Hello world" to everything. Environments of clients
are kept in `--cache`; each program has a time limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.clients.environments import CLIENTS, Client, environment
from tests.server.live import Live
from tests.server.process import READY, Process

HERE = Path(__file__).parent
SLOWEST_S = 600


def run(client: Client, cache: Path, urls: dict[str, str]) -> bool:
    """Run one client's programs in its environment; whether all of them passed."""
    python = environment(cache, client)
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    print(f"== {client.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pytest", "-q", "-c", HERE / "pytest.ini", f"--rootdir={HERE}"]
        done = subprocess.run(
            [*command, *(HERE / program for program in client.programs)],
            cwd=folder,
            env={**environ, **urls, "PATH": path, "HOME": folder, "HF_HUB_OFFLINE": "1"},
            timeout=SLOWEST_S,
        )
    return done.returncode == 0


def main() -> int:
    """Run them; 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="where environments are kept")
    parser.add_argument("clients", nargs="*", help="names; all by default")
    options = parser.parse_args()
    chosen = [one for one in CLIENTS if not options.clients or one.name in options.clients]
    if unknown := set(options.clients) - {one.name for one in chosen}:
        parser.error(f"no such clients: {', '.join(sorted(unknown))}")
    for client in chosen:
        environment(options.cache, client)
    with tempfile.TemporaryDirectory() as storage:
        os.environ["XDG_DATA_HOME"] = storage  # files and batches of both servers
        server = Process(None, "--context-length", "2048", "--max-total-tokens", "16384")
        try:
            server.wait_for(READY)
            with Live() as scripted:
                urls = {
                    "CLIENTS_MODEL_URL": f"http://127.0.0.1:{server.port}",
                    "CLIENTS_SCRIPTED_URL": scripted.url,
                }
                failed = [one.name for one in chosen if not run(one, options.cache, urls)]
        finally:
            server.close()
        if found := [line for line in server.lines if "Traceback" in line]:
            failed.append(f"the server, which logged {len(found)} tracebacks")
            print("\n".join(server.lines[-200:]))
    print(f"FAILED: {', '.join(failed)}" if failed else f"{len(chosen)} clients passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
