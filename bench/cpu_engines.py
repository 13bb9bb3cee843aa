"""The engines that `cpu_serving.py` compares: how each is started, found ready, paused and stopped.

A started server is kept in a file, so that one invocation can start what the next one measures.
Servers that are not measured are stopped by signal, since some spin while they wait.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
SERVED_NAME = "m"
START_LIMIT_S = 400.0
WAKE_S = 1.2  # an engine of ours beats once a second, and its parent looks at the beat
CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where the engines are, and what all of them share."""

    models: Path
    model: str
    threads: int
    llama_server: Path | None
    vllm_python: Path | None
    openvino_python: Path | None
    llama_slots: int
    arguments: dict[str, str]  # more arguments, by engine

    @property
    def directory(self) -> Path:
        """The model in bfloat16, with its tokenizer."""
        return self.models / self.model


@dataclass(frozen=True, slots=True)
class Command:
    """How to start an engine."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs."""

    engine: str
    model: str
    threads: int
    pid: int
    port: int
    version: str
    command: str

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_offline(self) -> bool:
        """Whether the workloads run inside of it, without HTTP."""
        return self.engine.startswith("openvino")

    def processes(self) -> list[psutil.Process]:
        """It and its descendants, the youngest last."""
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]

    def pause(self) -> None:
        """Take its cores away."""
        for process in self.processes():
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run; children first, since a parent may watch over them."""
        parent, *children = self.processes()
        for process in reversed(children):
            process.send_signal(signal.SIGCONT)
        time.sleep(WAKE_S)
        parent.send_signal(signal.SIGCONT)
        wait_ready(self.port, self.is_offline, parent)

    def stop(self) -> None:
        """End it and what it started."""
        processes = self.processes()
        for process in reversed(processes):
            process.send_signal(signal.SIGCONT)
        processes[0].send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=15)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=15)


def ours(setup: Setup, port: int, variant: str) -> Command:
    """This engine; the variant is a quantisation, or the type of a GGUF file."""
    model = setup.directory
    quantization = "none"
    if variant.startswith("q"):
        model = setup.models / f"{setup.model}-{variant}.gguf"
        quantization = "gguf"
    elif variant == "int8":
        quantization = "int8"
    words = [sys.executable, "-m", "trunkline", "--model", str(model), "--port", str(port)]
    words += ["--quantization", quantization]
    words += ["--served-model-name", SERVED_NAME, "--context-length", str(CONTEXT)]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "TRUNKLINE_CPU_THREADS": str(setup.threads),
    }
    return Command(words, environment)


def llama_cpp(setup: Setup, port: int, variant: str) -> Command:
    """llama.cpp's server; the variant is the type of its GGUF file."""
    model = setup.models / f"{setup.model}-{variant or 'bf16'}.gguf"
    threads, slots = str(setup.threads), setup.llama_slots
    words = [str(setup.llama_server), "-m", str(model), "--alias", SERVED_NAME]
    words += ["-t", threads, "-tb", threads, "-np", str(slots), "-c", str(slots * 2048)]
    words += ["--no-webui", "--host", "127.0.0.1", "--port", str(port)]
    return Command(words)


def vllm(setup: Setup, port: int, variant: str) -> Command:
    """The server of vLLM on its CPU backend."""
    assert setup.vllm_python is not None
    words = [str(setup.vllm_python.parent / "vllm"), "serve", str(setup.directory)]
    words += ["--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--max-num-seqs", "64"]
    words += ["--max-model-len", str(CONTEXT), "--enable-prefix-caching"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    return Command(words, environment)


def openvino(setup: Setup, port: int, variant: str) -> Command:
    """OpenVINO GenAI's pipeline, which runs the workloads in its own process."""
    script = Path(__file__).with_name("openvino_offline.py")
    model = setup.models / f"{setup.model}-openvino"
    words = [str(setup.openvino_python), str(script), str(model), str(setup.directory)]
    return Command([*words, str(port), str(setup.threads)])


KINDS = {"ours": ours, "llama.cpp": llama_cpp, "vllm": vllm, "openvino": openvino}
ENGINES = (
    *("ours", "ours-int8", "ours-q8_0", "ours-q4_0"),
    *("llama.cpp", "llama.cpp-q8_0", "llama.cpp-q4_0", "vllm", "openvino"),
)


def start(engine: str, setup: Setup, logs: Path) -> Server:
    """Start an engine and wait until it answers.

    Raises:
        RuntimeError: it ended, or took too long; the message names its log.
    """
    kind, _, variant = engine.partition("-")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = KINDS[kind](setup, port, variant)
    words = command.words + shlex.split(setup.arguments.get(engine, ""))
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{engine}.log"
    # How its threads wait is each engine's own business.
    foreign = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    environment = inherited | command.environment
    with log.open("w") as sink:
        process = subprocess.Popen(
            words, env=environment, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    server = Server(
        engine, setup.model, setup.threads, process.pid, port, "", shlex.join(_short(words))
    )
    try:
        wait_ready(port, server.is_offline, psutil.Process(process.pid))
    except BaseException as error:  # a signal's too: nobody else knows of it yet
        os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, RuntimeError):
            raise
        raise RuntimeError(f"{engine}: {error}; see {log}") from error
    return Server(**{**asdict(server), "version": _version(kind, server, setup)})


def _short(words: list[str]) -> list[str]:
    """Without the places where things are on this machine."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def wait_ready(port: int, is_offline: bool, process: psutil.Process) -> None:
    """Wait for the first answer.

    Raises:
        RuntimeError: the process ended, or did not answer in time.
    """
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError("the server has ended")
        try:
            if is_offline:
                socket.create_connection(("127.0.0.1", port), 5).close()
            else:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"the server was not ready within {START_LIMIT_S:.0f} s")


def _version(kind: str, server: Server, setup: Setup) -> str:
    if kind == "ours":
        commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    if kind == "llama.cpp":
        told = subprocess.run(
            [str(setup.llama_server), "--version"], capture_output=True, text=True, check=True
        )
        return (told.stderr + told.stdout).strip().splitlines()[0]
    if kind == "vllm":
        with urllib.request.urlopen(f"{server.url}/version", timeout=5) as answer:
            return str(json.load(answer)["version"])
    code = "import openvino_genai; print(openvino_genai.__version__)"
    told = subprocess.run(
        [str(setup.openvino_python), "-c", code], capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


def read_state(path: Path | None) -> list[Server]:
    """Servers of an earlier invocation that still run."""
    if path is None or not path.exists():
        return []
    servers = [Server(**entry) for entry in json.loads(path.read_text())]
    return [server for server in servers if psutil.pid_exists(server.pid)]


def write_state(path: Path, servers: list[Server]) -> None:
    """Keep servers for the next invocation."""
    path.write_text(json.dumps([asdict(server) for server in servers], indent=1))
